"""One file a command; ``quantkit.cli`` imports only the one that runs."""
