"""The command: a file for each kind, and shared options."""

from lockstep.cli.command import main as main
