"""The host's side of decoding: requests, slots and pages, what runs next, and the tokens that come back."""
