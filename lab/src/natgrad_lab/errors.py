"""The error a user can mend; the command prints it without a traceback."""


class UserError(Exception):
    """Something asked for is wrong or missing; the message says what is legal."""
