"""Floor 4: engines loaded for execution. Each vendor is imported only when its session is created."""
