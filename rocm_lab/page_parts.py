"""Parts of a page that programs write. Each lies between two marks with its name."""

from collections.abc import Iterable


def part_of(page: str, name: str) -> str:
    """The text between the marks of a name. Raises ValueError unless the page has them."""
    begin, end = _marks(name)
    _, has_begin, rest = page.partition(begin)
    part, has_end, _ = rest.partition(end)
    if not (has_begin and has_end):
        raise ValueError(f"the page has no part between {begin.strip()} and {end.strip()}")
    return part


def with_part(page: str, name: str, text: str) -> str:
    """The page with this text between the marks of a name. Raises ValueError."""
    begin, end = _marks(name)
    return page.replace(f"{begin}{part_of(page, name)}{end}", f"{begin}{text}{end}")


def rows_of(page: str, name: str) -> list[str]:
    """The rows of a part that ends in a table, without the table's head. Raises ValueError."""
    return _head_and_rows(page, name)[1]


def with_rows(page: str, name: str, rows: Iterable[str]) -> str:
    """The page with these rows in the table of a part, under the head that it has. Raises ValueError.

    rows: lines, each with its end
    """
    return with_part(page, name, "".join([_head_and_rows(page, name)[0], *rows]))


def _head_and_rows(page: str, name: str) -> tuple[str, list[str]]:
    head, rule, rest = part_of(page, name).partition("\n|---")
    columns, end, rows = rest.partition("\n")
    return f"{head}{rule}{columns}{end}", rows.splitlines(keepends=True)


def _marks(name: str) -> tuple[str, str]:
    return f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
