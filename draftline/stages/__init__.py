"""From a pipeline to a served model: convert -> check -> build -> package -> smoke."""
