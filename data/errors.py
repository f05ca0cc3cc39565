"""The one exception that this package raises for what a user can mend."""


class DataError(Exception):
    """One sentence that names the file (or option), what was expected and what was found."""
