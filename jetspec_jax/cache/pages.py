"""The size of a page, and the mark of a missing one: what the host needs to know of stores; no JAX."""

# One step of the attention kernel's keys: pages of 128 were no faster on an H200, and waste more.
PAGE_SIZE = 64
#: The entry of a block table that is no page; outside of 0..P - 1 any entry is none.
NO_PAGE = -1
