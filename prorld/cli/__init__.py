"""The command line: one file per command. Only this room calls ``trio.run``; commands of a client import no trio."""
