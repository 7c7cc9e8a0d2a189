"""Masks of grammars at the nodes of trees: those of every token tried from scratch, and a whole language."""

import sys

import numpy as np
import pytest

from jetspec_jax.sampling import grammar as module
from jetspec_jax.sampling.grammar import Vocabulary
from jetspec_jax.sampling.structured import StructuredOutputsParams as Wanted
from tests.decode.tiny import word_tokenizer
from tests.sampling.byte_tokenizer import SPECIAL, byte_tokenizer

TOKENIZER = byte_tokenizer()
SIZE = len(TOKENIZER)
VOCAB = SIZE + 5  # the last five are no tokens
END, CALL = TOKENIZER.convert_tokens_to_ids(SPECIAL)
ROOT = np.array([0]), np.array([-1]), 1

SCHEMA = {
    "type": "object",
    "properties": {"ab": {"type": "boolean"}, "é": {"enum": ["yes", "no"]}},
    "required": ["ab"],
}
GRAMMARS = {
    "json": Wanted(json=SCHEMA),
    "json_object": Wanted(json_object=True),
    "regex": Wanted(regex="(ab|abc)*(é|12){1,3}"),
    "choice": Wanted(choice=["yes", "no", "abab", "ye", 'a"b\n']),
    "lark": Wanted(grammar='start: item (", " item)*\nitem: /[ab]+/ | "12"'),
    "gbnf": Wanted(grammar='root ::= item root | "no"\nitem ::= [a-c] | "true"'),
    "lazy": Wanted(grammar='start: foo "no"\nfoo[lazy]: /[abc]+b/'),
    "suffix": Wanted(grammar='start: foo\nfoo[suffix="no"]: /[a-z ]+/'),
    "tokens": Wanted(grammar='start: "a" <call> "b"'),
}


@pytest.fixture(scope="module")
def vocabulary():
    return Vocabulary(TOKENIZER, VOCAB, [END])


def tokens_of(text):
    return TOKENIZER.encode(text, add_special_tokens=False)


def members(mask, size=VOCAB):
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:size]).tolist())


def by_trying(vocabulary, wanted, path, stops=frozenset({END})):
    """The tokens that may follow a path, each tried after it by a matcher that has tried no other."""
    after = vocabulary.matcher(wanted, stops)._matcher
    if not after.consume_tokens(path):
        return None
    ends = stops if after.is_accepting() else set()
    # Where bytes are forced, llguidance takes the tokenizer's own token for them alone.
    if forced := after.compute_ff_tokens():
        return {forced[0], *ends}
    return {
        token for token in set(range(SIZE)) - {END} if after.deep_copy().try_consume_tokens([token])
    } | ends


def test_a_copy_goes_on_alone(vocabulary):
    matcher = vocabulary.matcher(GRAMMARS["choice"], [END])
    matcher.advance(tokens_of("y"))
    [before], copy = matcher.masks_of_tree(*ROOT), matcher.copy()
    np.testing.assert_array_equal(copy.masks_of_tree(*ROOT), [before])
    copy.advance(tokens_of("e"))
    assert (matcher.count, copy.count) == (1, 2)
    np.testing.assert_array_equal(matcher.masks_of_tree(*ROOT), [before])
    assert members(copy.masks_of_tree(*ROOT)[0]) != members(before)


@pytest.mark.parametrize("kind", GRAMMARS)
def test_masks_are_what_every_token_says_when_tried(vocabulary, kind):
    wanted, rng = GRAMMARS[kind], np.random.default_rng(list(GRAMMARS).index(kind))
    matcher, path, seen = vocabulary.matcher(wanted, [END]), [], 0
    for _ in range(4):
        tokens, parents, paths = [0], [-1], [[]]
        for node in range(1, 12):
            parent = int(rng.integers(max(0, node - 5), node))
            may = sorted(by_trying(vocabulary, wanted, [*path, *paths[parent]]) or ())
            on_grammar = may and rng.random() < 0.8
            tokens.append(int(rng.choice(may) if on_grammar else rng.integers(VOCAB)))
            parents.append(parent)
            paths.append([*paths[parent], tokens[-1]])
        masks = matcher.masks_of_tree(np.array(tokens), np.array(parents), 12)
        assert masks.shape == (12, -(-VOCAB // 32))
        for mask, below in zip(masks, paths, strict=True):
            may = None if END in below else by_trying(vocabulary, wanted, [*path, *below])
            if may is None:
                assert members(mask) == set(range(VOCAB))
            else:
                assert members(mask) == may
                seen += 1
        on = sorted(members(masks[0]) - {END})
        if not on:
            break
        path.append(int(rng.choice(on)))
        matcher.advance(path[-1:])
    assert matcher.problem is None
    assert matcher.count == len(path)
    assert seen >= 5


@pytest.mark.parametrize(
    ("wanted", "texts"),
    [
        (Wanted(choice=["yes", "no", "yesno", "é\x00", '"\\']), {"yes", "no", "yesno", "é\x00", '"\\'}),
        (
            Wanted(regex="(ab?|é){1,2}"),
            {"a", "ab", "é", *(a + b for a in ("a", "ab", "é") for b in ("a", "ab", "é"))},
        ),
        (Wanted(json={"enum": ["12", 12, None]}), {'"12"', "12", "null"}),
        (
            Wanted(
                json={"items": {"enum": [1, "é"]}, "type": "array", "maxItems": 1},
                disable_any_whitespace=True,
            ),
            {"[]", "[1]", '["é"]'},
        ),
        (Wanted(grammar='start: "a" b\nb: "b" | "c" b?'), {"ab", "ac", "acb", "acc"}),
        (Wanted(regex="(yes)?"), {"", "yes"}),
    ],
)
def test_the_texts_that_masks_allow_are_those_of_the_grammar(vocabulary, wanted, texts):
    """All ways that masks leave open, to their ends; the one endless one is cut."""
    found, line = set(), [vocabulary.matcher(wanted, [END])]
    ways = [(line[0], [])]
    while ways:
        matcher, path = ways.pop()
        for token in members(matcher.masks_of_tree(*ROOT)[0]):
            if token == END:
                found.add(TOKENIZER.decode(path))
            elif len(path) < 5:
                other = vocabulary.matcher(wanted, [END])
                other.advance([*path, token])
                assert other.problem is None
                ways.append((other, [*path, token]))
    assert {text for text in found if "cc" not in text or text in texts} == texts


def test_a_tree_leaves_the_committed_state_as_it_is(vocabulary):
    matcher = vocabulary.matcher(GRAMMARS["regex"], [END])
    before = matcher.masks_of_tree(*ROOT)
    [ab, e] = [*tokens_of("ab"), *tokens_of("é")]
    tree = np.array([7, ab, e, ab, e, END, ab]), np.array([-1, 0, 0, 1, 3, 4, 0])
    masks = matcher.masks_of_tree(*tree, 6)
    assert (matcher.masks_of_tree(*ROOT) == before).all()
    assert (masks[0] == before[0]).all()
    assert END not in members(masks[3])
    assert END in members(masks[4])
    # After an end nothing comes, and padding is no node.
    assert members(masks[5]) == members(masks[6]) == set(range(VOCAB))
    matcher.advance([ab, ab, e])
    assert matcher.count == 3
    assert (matcher.masks_of_tree(*ROOT)[0] == masks[4]).all()
    matcher.advance([END, 5, 6])  # what a round commits after an end
    assert (matcher.count, matcher.problem) == (4, None)


def test_once_the_grammar_is_over_only_ends_are_allowed(vocabulary):
    matcher = vocabulary.matcher(Wanted(choice=["yes"]), [END, CALL])
    matcher.advance(tokens_of("yes"))
    assert members(matcher.masks_of_tree(*ROOT)[0]) == {END, CALL}


def test_a_stop_token_that_is_text_is_allowed_as_text_and_at_the_end(vocabulary):
    [yes, no] = [*tokens_of("yes"), *tokens_of("no")]
    matcher = vocabulary.matcher(Wanted(regex="(yes)?no|12"), [no])
    assert yes in members(matcher.masks_of_tree(*ROOT)[0])
    assert no in members(matcher.masks_of_tree(*ROOT)[0])
    matcher.advance(tokens_of("12"))
    assert members(matcher.masks_of_tree(*ROOT)[0]) == {no}, "the tokenizer's own end ends nothing here"


def test_tokens_that_the_target_lacks_are_cut_off():
    [a] = tokens_of("a")
    small = Vocabulary(TOKENIZER, 200, [199])
    assert a < 200
    masks = small.matcher(Wanted(regex="a|é"), [199]).masks_of_tree(*ROOT)
    assert masks.shape == (1, 7)
    # The two bytes of the other choice have tokens below, and one above for both.
    assert a in members(masks[0], 224)
    assert members(masks[0], 224) == {a, *TOKENIZER.convert_tokens_to_ids(["Ã"])}


def test_a_dead_end_is_told_and_ends_the_request():
    """No token goes on, though the grammar does; one way is dead, the other is not."""
    tokenizer = byte_tokenizer(without="z")
    end = tokenizer.convert_tokens_to_ids(SPECIAL[0])
    vocabulary = Vocabulary(tokenizer, len(tokenizer), [end])
    [a, b, c, d] = (tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "abcd")
    matcher = vocabulary.matcher(Wanted(regex="[ad](bz|c+)"), [end])
    tokens, parents = np.array([0, a, b, c, d, b, c]), np.array([-1, 0, 1, 1, 0, 4, 4])
    masks = matcher.masks_of_tree(tokens, parents, 7)
    assert [members(mask, len(tokenizer)) for mask in masks[[2, 5]]] == [{end}, {end}]
    assert (masks[3] == masks[6]).all()
    assert members(masks[6], len(tokenizer)) == {c, end}
    matcher.advance([a])
    assert matcher.problem is None
    matcher.advance([b])
    assert matcher.problem is None
    assert members(matcher.masks_of_tree(*ROOT)[0], len(tokenizer)) == {end}
    matcher.advance([end])
    assert matcher.problem == "the text ends where the grammar goes on: NoExtensionBias"


def test_a_token_off_the_grammar_is_told(vocabulary):
    matcher = vocabulary.matcher(Wanted(choice=["yes"]), [END])
    matcher.advance(tokens_of("no"))
    assert "doesn't satisfy the grammar" in matcher.problem
    assert members(matcher.masks_of_tree(*ROOT)[0]) == {END}


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (Wanted(regex="(a"), "regex does not compile: .*unclosed group"),
        (Wanted(regex="(" * 5000 + "a" + ")" * 5000), "regex does not compile: .*nest"),
        (Wanted(regex=r"[^\s\S]"), "regex admits no text of the target's tokens"),
        (Wanted(grammar="start: foo"), 'grammar does not compile: .*unknown name: "foo"'),
        (Wanted(grammar='start: start "a"'), "grammar admits no text"),
        (Wanted(grammar='start: "ab" foo\nfoo[max_tokens=2]: /a+/'), "cannot be used with trees: rollback"),
        (Wanted(grammar='start: foo "a"\nfoo[stop="b"]: /.*/'), "cannot be used with trees: rollback"),
        (Wanted(json={"enum": []}), "json does not compile: Unsatisfiable schema"),
        (Wanted(json={"type": "array", "uniqueItems": True}), "Unimplemented keys: ..uniqueItems"),
        (Wanted(json={"$ref": "#"}), "json admits no text"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_grammars_that_cannot_be(vocabulary, wanted, words):
    with pytest.raises(ValueError, match=f"^structured_outputs: .*{words}"):
        vocabulary.matcher(wanted, [END])


def test_a_request_that_nothing_ends(vocabulary):
    with pytest.raises(ValueError, match=r"needs a token that ends the text.*stop_token_ids"):
        vocabulary.matcher(GRAMMARS["regex"], [])
    # The target may have none, as long as the request has.
    other = Vocabulary(TOKENIZER, VOCAB, [])
    assert other.matcher(GRAMMARS["choice"], [CALL]).masks_of_tree(*ROOT).any()


def test_tokenizers_that_cannot_be():
    with pytest.raises(ValueError, match=r"llguidance cannot take the target's tokenizer: .*decoder"):
        Vocabulary(word_tokenizer(64), 64, [3])
    with pytest.raises(ValueError, match="needs a tokenizer, and the target has none"):
        Vocabulary(None, 64, [3])


def test_without_llguidance_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ImportError, match=r'pip install "jetspec-jax\[structured\]"'):
        Vocabulary(TOKENIZER, VOCAB, [END])


def test_few_grammars_are_kept(monkeypatch):
    monkeypatch.setattr(module, "MOST_KEPT", 2)
    vocabulary, made = Vocabulary(TOKENIZER, VOCAB, [END]), []
    compiled = Vocabulary._compiled
    monkeypatch.setattr(Vocabulary, "_compiled", lambda self, own: made.append(own) or compiled(self, own))
    a, b, c = (Wanted(regex=letter) for letter in "abc")
    for own in (a, b, a, c, a, b):
        vocabulary.matcher(own, [END])
    assert made == [a, b, c, b]
