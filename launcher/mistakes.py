"""What a command says of an error that its user can mend."""


def sentence(error: Exception) -> str:
    """One line; of the operating system's errors the file and what is wrong with it, without a number."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror.lower()}"
    return " ".join(str(error).splitlines())
