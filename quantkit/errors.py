"""Errors that a user can act on. The command line prints them as one sentence and exits with 2."""


class UserError(Exception):
    """Something outside quantkit is wrong; the message says what, why and what to do next."""


class VerificationError(UserError):
    """What was written is not what was solved."""
