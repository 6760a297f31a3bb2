"""The processes of a program: who they are, how they meet, and all they tell each other."""

from evogrpo.processes.exchange import ProcessError, Processes
from evogrpo.processes.meeting import processes, restarted, speaks

__all__ = ["ProcessError", "Processes", "processes", "restarted", "speaks"]
