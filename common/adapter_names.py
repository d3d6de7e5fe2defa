"""What an adapter may be called and where it may lie; one rule for routers and nodes."""

MAX_NAME = 256
MAX_PATH = 4096


def name_problem(name: str) -> str | None:
    """Why no adapter can have this name, or None."""
    if not 0 < len(name) <= MAX_NAME:
        return f"an adapter's name has 1 to {MAX_NAME} characters, not {len(name)}"
    if not name.isprintable() or name != name.strip():
        return f"{name!r}: an adapter's name is printable and neither begins nor ends with a space"
    if ":" in name:
        return f"{name!r}: a colon would make model='base:adapter' ambiguous"
    return None


def path_problem(path: str) -> str | None:
    """Why no adapter can be read from this path, or None. Whether one is there only nodes know."""
    if not 0 < len(path) <= MAX_PATH:
        return f"a path has 1 to {MAX_PATH} characters, not {len(path)}"
    if not path.isprintable():
        return f"{path!r}: a path with unprintable characters"
    return None
