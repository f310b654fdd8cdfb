"""The command: a file for each, shared options, Ctrl-C."""

from lockstep.cli.command import main as main
