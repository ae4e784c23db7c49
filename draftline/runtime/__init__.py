"""Floor 5: the runtime. Requests, scheduler, prefix cache; it knows sessions only through their protocol."""
