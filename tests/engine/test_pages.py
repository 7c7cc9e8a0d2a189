"""Pages by themselves: names, holders, what is cached, and what is evicted."""

import numpy as np
import pytest

from jetspec_jax.cache.pages import PAGE_SIZE, pages_for
from jetspec_jax.engine.pages import PagePool, page_keys
from tests.decode.tiny import check_pool

RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, 1000, 5 * PAGE_SIZE + 7).astype(np.int32)


class TestKeys:
    def test_one_for_each_full_page(self):
        assert [len(page_keys(TOKENS[:count])) for count in (0, 1, 63, 64, 127, 128)] == [0, 0, 0, 1, 1, 2]
        assert len(set(page_keys(TOKENS))) == 5

    def test_equal_for_equal_beginnings_alone(self):
        keys = page_keys(TOKENS)
        assert page_keys(TOKENS[:200]) == keys[:3]
        for place in (0, 63, 64, 200):
            other = TOKENS.copy()
            other[place] += 1
            got = page_keys(other)
            page = place // PAGE_SIZE
            assert got[:page] == keys[:page]
            assert not set(got[page:]) & set(keys)

    def test_the_same_tokens_elsewhere_have_other_names(self):
        twice = np.tile(TOKENS[:PAGE_SIZE], 2)
        assert len(set(page_keys(twice))) == 2

    def test_may_be_made_piece_by_piece(self):
        keys = page_keys(TOKENS[:128])
        assert keys + page_keys(TOKENS[128:], keys[-1]) == page_keys(TOKENS)

    def test_salts_share_nothing(self):
        made = [page_keys(TOKENS, salt=salt) for salt in (None, "", "a", "b", "salt")]
        assert len({key for keys in made for key in keys}) == 5 * len(made)
        assert page_keys(TOKENS, salt="a") == made[2]

    def test_names_are_the_same_in_every_process(self):
        """Several processes decide alike, and none of them has Python's own hashes."""
        assert page_keys(np.arange(64, dtype=np.int32))[0].hex().startswith("ada5d949bab9e3f4")


class TestPool:
    def test_hands_out_each_page_once(self):
        pool = PagePool(5)
        first, second = pool.allocate(2), pool.allocate(3)
        assert sorted(first + second) == [0, 1, 2, 3, 4]
        assert pool.allocate(1) is None
        check_pool(pool, [first, second])
        pool.free(first)
        assert pool.allocate(3) is None
        assert pool.num_free == 2
        assert sorted(pool.allocate(2)) == sorted(first)

    def test_leaves_some_to_spare(self):
        pool = PagePool(5)
        assert pool.allocate(4, spare=2) is None
        assert len(pool.allocate(3, spare=2)) == 3
        assert pool.allocate(0) == []

    def test_shares_what_it_has_a_name_for(self):
        pool, keys = PagePool(8), page_keys(TOKENS)
        first = pool.allocate(4)
        pool.register(first[:3], keys[:3])
        assert pool.find(keys) == first[:3]
        assert pool.find(keys[:2]) == first[:2]
        assert pool.find(page_keys(TOKENS, salt="other")) == []
        second = pool.allocate(5, pool.find(keys))
        assert second[:3] == first[:3]
        assert not set(second[3:]) & set(first)
        check_pool(pool, [first, second])
        pool.free(first)
        check_pool(pool, [second])
        assert pool.num_free == 3
        pool.free(second)
        check_pool(pool, [])
        assert pool.num_free == 8
        assert pool.find(keys) == first[:3]

    def test_a_name_stays_with_the_first_page_that_had_it(self):
        pool, keys = PagePool(4), page_keys(TOKENS)
        first, second = pool.allocate(2), pool.allocate(2)
        pool.register(first, keys[:2])
        pool.register(second, keys[:2])
        assert pool.find(keys) == first
        pool.free(second)
        check_pool(pool, [first])
        assert pool.num_free == 2

    def test_evicts_the_last_pages_of_those_who_went_first(self):
        pool, keys, others = PagePool(6), page_keys(TOKENS), page_keys(TOKENS, salt="other")
        first, second = pool.allocate(3), pool.allocate(3)
        pool.register(first, keys[:3])
        pool.register(second, others[:3])
        pool.free(second)
        pool.free(first)
        pool.allocate(2)
        assert (pool.find(others), pool.find(keys)) == (second[:1], first)
        # Who is found is held again, and goes last.
        pool.free(pool.allocate(1, pool.find(others)))
        pool.allocate(3)
        assert (pool.find(others), pool.find(keys)) == (second[:1], [])

    def test_does_not_evict_what_is_just_found(self):
        pool, keys = PagePool(4), page_keys(TOKENS)
        pages = pool.allocate(3)
        pool.register(pages, keys[:3])
        pool.free(pages)
        assert pool.num_free == 4
        assert pool.allocate(5, pool.find(keys)) is None
        check_pool(pool, [])
        got = pool.allocate(4, pool.find(keys))
        assert got[:3] == pages
        check_pool(pool, [got])

    def test_without_sharing_nothing_is_cached(self):
        pool, keys = PagePool(3, shares=False), page_keys(TOKENS)
        pages = pool.allocate(2)
        pool.register(pages, keys[:2])
        pool.free(pages)
        assert pool.find(keys) == []
        check_pool(pool, [])

    @pytest.mark.parametrize("seed", range(3))
    def test_stays_whole_whatever_comes(self, seed):
        """Sequences of few beginnings come, grow and go."""
        rng = np.random.default_rng(seed)
        pool, held, hits, refused = PagePool(24), [], 0, 0
        texts = [rng.integers(0, 9, 10 * PAGE_SIZE).astype(np.int32) for _ in range(4)]
        keys = [page_keys(text) for text in texts]
        for _ in range(2000):
            check_pool(pool, [pages for _, pages in held])
            if held and rng.random() < 0.45:
                _, pages = held.pop(int(rng.integers(len(held))))
                pool.free(pages)
                continue
            which, count = int(rng.integers(4)), int(rng.integers(1, 9))
            found = pool.find(keys[which][:count])
            pages = pool.allocate(count + int(rng.integers(3)), found)
            if pages is None:
                refused += 1
                continue
            hits += bool(found)
            pool.register(pages[len(found) : count], keys[which][len(found) : count])
            held.append((which, pages))
        for _, pages in held:
            pool.free(pages)
        check_pool(pool, [])
        assert pool.num_free == 24
        assert min(hits, refused) > 200


def test_pages_for():
    assert [pages_for(count) for count in (0, 1, 64, 65)] == [0, 1, 1, 2]
