"""Invariants of a prefix cache at any moment, after any calls."""

from __future__ import annotations

from rocm_attn.paging.request_table import RequestTable
from rocm_serve.prefix_cache import _NOT_KEPT, PrefixCache


def check_cache(cache: PrefixCache, table: RequestTable) -> None:
    """Checks that every page can be reached, is kept, and counts as idle if no row holds it; no other page is kept."""
    cache.num_idle(0)  # takes note of all rows that were freed
    for key, page in cache._pages.items():
        assert page.key == key
        if page.before is not None:
            assert cache._pages[page.before.key] is page.before
            assert page.before.after[key] is page
        for after in page.after.values():
            assert cache._pages[after.key].before is page
    for space, pages in enumerate(table.spaces):
        kept = [page for page in cache._pages.values() if page.num_rows[space] != _NOT_KEPT]
        ids = [page.kept_id for page in kept]
        holders = table.kept.num_holders_of(ids, pages.space).tolist()
        assert holders == [1 + page.num_rows[space] for page in kept]
        assert set(cache._idle[space]) == {page for page in kept if page.num_rows[space] == 0}
        num_kept = len({int(page) for page in table.kept.pages(ids, pages.space)})
        assert num_kept == len(kept)
    _check_order(cache)
    _check_states(cache, table)


def _check_order(cache: PrefixCache) -> None:
    """Checks that in the full space no idle page is given back while an idle one comes after it in its chain."""
    place = {page: number for number, page in enumerate(cache._idle[0])}
    for page, number in place.items():
        assert all(place.get(after, -1) < number for after in page.after.values())


def _check_states(cache: PrefixCache, table: RequestTable) -> None:
    """Checks that the cache knows which pages are kept with states of recurrent layers, and that each state has one."""
    if not cache.has_states:
        return
    pages = list(cache._pages.values())
    with_states = table.kept.have_states([page.kept_id for page in pages]).tolist() if pages else []
    assert set(cache._states) == {page for page, has_one in zip(pages, with_states, strict=True) if has_one}
    assert len(cache._states) + table.kept.num_free_states == table.states.recurrent.checkpoints
