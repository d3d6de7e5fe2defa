"""What may stop a process before it serves, told to the user in one line."""


class StartupError(Exception):
    """Something outside the program must change first: a setting, a file, the network.

    The command line prints the message as one line on stderr and exits with code 2.
    """
