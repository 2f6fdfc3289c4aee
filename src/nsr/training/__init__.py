"""One readable loop a task, and what the loops share: replicas, schedules, seeded noise, captures, checkpoints."""
