"""Invariants of a prefix cache at any moment, after any calls."""

from rocm_attn.paging.request_table import RequestTable
from rocm_serve.cached_pages import NO_PAGE, NOT_KEPT
from rocm_serve.prefix_cache import PrefixCache


def check_cache(cache: PrefixCache, table: RequestTable) -> None:
    """Checks that every page can be reached, is kept, and counts as idle if no row holds it; no other page is kept."""
    columns, known = cache._columns, set(cache._pages.values())
    assert len(known) == len(cache._pages)
    for key, page in cache._pages.items():
        assert columns.key[page] == key
        before = columns.before[page]
        assert before == NO_PAGE or (before in known and page in columns.after(before))
        assert all(after in known and columns.before[after] == page for after in columns.after(page))
        assert len(set(columns.after(page))) == len(list(columns.after(page)))
    assert not known.intersection(columns._free)
    assert len(set(columns._free)) == len(columns._free)
    for space, pages in enumerate(table.spaces):
        num_rows = columns.num_rows[space]
        kept = [page for page in known if num_rows[page] != NOT_KEPT]
        assert not (set((num_rows != NOT_KEPT).nonzero()[0].tolist()) - known), "a page that is not found is not kept"
        ids = columns.kept_id[kept]
        holders = table.kept.num_holders_of(ids, pages.space).tolist()
        assert holders == [1 + num_rows[page] for page in kept]
        idle = cache._idle[space].in_order().tolist()
        assert len(idle) == len(cache._idle[space]) == num_rows[kept].tolist().count(0) if kept else not idle
        assert set(idle) == {page for page in kept if num_rows[page] == 0}
        num_kept = len({int(page) for page in table.kept.pages(ids, pages.space)})
        assert num_kept == len(kept)
    _check_order(cache)
    _check_states(cache, table)


def _check_order(cache: PrefixCache) -> None:
    """Checks that in the full space no idle page is given back while an idle one comes after it in its chain."""
    place = {page: number for number, page in enumerate(cache._idle[0].in_order().tolist())}
    for page, number in place.items():
        assert all(place.get(after, -1) < number for after in cache._columns.after(page))


def _check_states(cache: PrefixCache, table: RequestTable) -> None:
    """Checks that the cache knows which pages are kept with states of recurrent layers, and that each state has one."""
    if not cache.has_states:
        return
    pages = list(cache._pages.values())
    with_states = table.kept.have_states(cache._columns.kept_id[pages]).tolist() if pages else []
    assert set(cache._states) == {page for page, has_one in zip(pages, with_states, strict=True) if has_one}
    assert len(cache._states) + table.kept.num_free_states == table.states.recurrent.checkpoints
