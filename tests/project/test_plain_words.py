"""README, CONTRIBUTING, CHANGELOG and docs use standard terms in American English, in sentences with a subject.

Each entry of `DIALECT` is a word or phrase that must not appear in prose: a pattern, what to write instead, and a
sentence in which the pattern must be found. Code is not prose: fenced blocks, inline code, link targets, comments, and
the tables that are generated from the code (`GENERATED`).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
# docs/situations.md is generated from error messages.
NOT_CHECKED = {"docs/situations.md"}
PAGES = tuple(
    page
    for page in (
        "README.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")),
    )
    if page not in NOT_CHECKED
)
# Parts of a page that a script writes, from a comment to the next one.
GENERATED = (
    ("<!-- the tables of ", "<!-- end of the tables -->"),
    ("<!-- text from ", "<!-- end of text from the code -->"),
)
MEASURED = {"docs/benchmarks.md"}  # rows of its tables are those in benchmarks/results, word for word


class Word(NamedTuple):
    """A word or phrase of the old dialect.

    Attributes:
        pattern: Regular expression for it; case is ignored, and it matches whole words.
        instead: What to write.
        example: A sentence that has it.
    """

    pattern: str
    instead: str
    example: str


DIALECT = (
    Word("cuts?|cutting|uncut", "shard, split, truncate", "Tensors are cut for the mesh."),
    Word("portions?", "microbatch, part", "In two portions."),
    Word("pieces?", "shard, stage, part", "The reference runs in pieces."),
    Word("alike", "identical, equal", "Two runs alike are alike."),
    Word("away", "difference", "The loss is 2e-6 away."),
    Word("told|tells? .{0,20} apart|told apart", "recognized, reported, logged", "Phases are told when they end."),
    Word("said|says?|saying", "report, print, explain, state", "A note says so."),
    Word(
        "(?:held|holds?|holding) (?:\\S+ ){0,6}against",
        "compare with, check against",
        "It holds both against each other.",
    ),
    Word("go(?:es)? on|went on|going on|gone on", "continue, resume", "What goes on from step 5."),
    Word("la(?:id|ys?) out|re-?la(?:id|ys?)", "sharded, resharded", "Files are laid out for ranks."),
    Word("le(?:ft|aves?|aving) behind", "dropped", "Optimizer state is left behind."),
    Word("sp(?:eaks?|oken|oke) of", "match, mention", "What no rule speaks of is replicated."),
    Word("what (?:it|they) may", "tolerance", "At 17% of what it may."),
    Word("in the form of", "as, in the format of", "Inputs in the form of images."),
    Word("as the size asks for|what holds without", "default, chosen by size", "The files are as the size asks for."),
    Word("a text(?! model)|texts", "a string, text input", "Paths are texts or Paths."),
    Word("truth values?", "boolean", "Flags are truth values."),
    Word("(?:that|which) (?:see|sees|hear|hears)|see or hear", "vision, audio", "For a model that sees."),
    Word("in the way", "exists, conflicts with", "A file is in the way."),
    Word("plant(?:s|ed|ing)?", "inject", "Of 38 planted faults all are found."),
    Word("anew", "again, restart", "The schedule begins anew."),
    Word("besides?", "next to, in addition", "Files beside the weights."),
    Word("lies?|lay|lain|lying", "is, is stored", "The config lies in the directory."),
    Word("settle[sd]?|settling", "decide, resolve", "Ties are settled by bytes."),
    Word("nobody'?s?|somebody'?s?(?! else)", "no one, another process", "A key that nobody knows."),
    Word("strangers?", "untrusted", "Names from strangers."),
    Word("(?:is|are) not ours|of ours|of one's own", "third-party, custom", "A trainer that is not ours."),
    Word("doubts? itself", "(drop it)", "A run that doubts itself."),
    Word("brings? no|brings? along", "does not include", "The package brings no torch."),
    Word("all the same", "still", "It is wrong all the same."),
    Word("for ever", "forever", "It takes for ever."),
    Word("(?<!there )(?:is|are|was|were) no(?! longer| one)", "is not a, are not", "Such a key is no difference."),
    Word("judges?|judged|judging|judge?ment", "compare, check, decide", "Exact oracles judge."),
    Word("refused by name|told by name", "rejected, an error that names it", "Others are refused by name."),
    Word("(?<!learning[ -])(?<!data )rates?", "learning rate", "The rate is 5 % higher."),
    Word("rows? of (?:a|each|the|one) (?:data rank|step)", "sequences per data rank", "The rows of a data rank."),
    Word("widen(?:s|ed)? by", "increased", "The limit is widened by two."),
    Word("(?:a|no) word for", "recognize", "What ckptx has no word for."),
    Word("(?:first|last) words of (?:its|their)", "prefix", "By the first words of their names."),
    Word("loudly|without a word", "with a warning, silently", "Both are kept, loudly."),
    Word("rooms?|floors?", "package, layer", "The rooms and floors of the code."),
    Word("wants? it|a want", "needed value", "That place is a want."),
    Word("by itself", "separately, automatically", "The other stores it by itself."),
    Word("for no step", "without training a step", "It resumes for no step."),
    Word("at hand", "current", "The layer at hand."),
    Word("whoever|whomever", "any process that", "Whoever was killed where."),
    Word("therefrom|thereof|whereof|herein", "(plain English)", "The parts thereof."),
    Word("twins?|brothers?", "pair, counterpart", "A name shares the state of its twin."),
    Word("comes? back|came back", "is restored, returns", "The files that came back."),
    Word("takes? it for|taken? for|takes? for", "mistake for, interpret as", "A loader takes it for a checkpoint."),
    Word(
        "(?:is|are)(?: then)? (?:an error|errors)",
        "raises an error, fails with exit code N",
        "A duplicate key is an error.",
    ),
    Word("also (?:if|on failure)", "even if, even on failure", "The report is written, also on failure."),
    Word("sounds?", "audio", "An image or a sound."),
    Word("data sets?", "dataset", "A public data set."),
    Word("rotary heads?", "query and key projections, RoPE", "The rows of rotary heads are reordered."),
    Word("rests? on", "assumption, based on", "What the numbers rest on."),
    Word("shrunken", "small version of", "The recipes with shrunken models."),
    Word("pro(?:of|ofs|ves?|ved|ven|ving)", "verify, check, show", "It proves that the result is right."),
    Word("tiles? (?:each|every|the|a)|must tile", "cover without gaps or overlaps", "Shards must tile every tensor."),
    Word(
        "nothing (?:is|was|has been) published|publish(?:es|ed)? nothing|before publishing"
        "|(?:output|step)s? (?:is|are|was|were) published",
        "DST is not created, moved into place",
        "The conversion fails and publishes nothing.",
    ),
    Word("(?:files?|tensors?) of single ranks", "per-rank files", "Files of single ranks are rejected."),
    Word("passed through", "write unchanged", "Names that are passed through."),
    Word("ends? elsewhere|or worse", "a different state, uninitialized memory", "The resumed run ends elsewhere."),
    Word(
        "(?:biases|sinks|norms) of (?:attention|norms|queries|keys|the head)",
        "attention biases, query and key norms",
        "It has biases of attention.",
    ),
    Word(
        "(?:a|the|each|every|such a) (?:torchtitan|training) step (?:to|as a|that was|stores)|resumes? a step",
        "training checkpoint",
        "It converts a training step to safetensors.",
    ),
    Word(
        "(?:behaviou?r|colou?r|honou?r|neighbou?r|favou?r)(?<=our)\\w*|centre[sd]?|\\w+(?<!prec)(?<!prom)(?<!exerc)(?:ognis|antis|alis|imis|oris)(?:e|ed|es|ing|ation)",
        "American spelling",
        "The quantised model.",
    ),
)

# Sentences with words that look like dialect and are not.
ALLOWED = (
    "For a matrix with 10 rows, row 3 is on rank 1; rows of the projections are reordered.",
    "There is no gradient. It is no longer needed.",
    "Do not run `cut_model` or read `docs/cut.md` for the learning rate at any data rate.",
    "The check `rate` compares the learning rates.",
    "See [the table](benchmarks/results/judges.md).",
    "The promise is precise; initialize, generalization, exercised, realistic.",
    "Checkpoints of torch are shared, sharded and replicated; the layout is balanced.",
    "Add a text model, not a vision model.",
    "It raises an error, even on failure; exit 1 also means a difference. It runs in one training step.",
)


def prose_of(text: str, *, tables: bool = True) -> list[tuple[int, str]]:
    """Return the paragraphs, items and rows of a page without code, each with the number of its first line."""
    found: list[tuple[int, str]] = []
    fence, end, joined = "", "", False
    for number, line in enumerate(text.splitlines(), 1):
        mark = re.match(r" *(`{3,})", line)
        if fence:
            fence = "" if line.strip() == fence else fence
        elif end:
            end = "" if line.startswith(end) else end
        elif mark:
            fence, joined = mark[1], False
        elif line.startswith("<!--"):
            end, joined = next((last for first, last in GENERATED if line.startswith(first)), ""), False
        elif line.startswith("    ") and not joined:
            continue  # an indented block
        elif not line.strip() or (line.startswith("|") and not tables):
            joined = False
        elif joined and not re.match(r"\s*([*#|]|\d+\.)", line):
            found[-1] = found[-1][0], f"{found[-1][1]} {line.strip()}"
        else:
            found.append((number, line.strip()))
            joined = not line.startswith(("|", "#"))
    without_code = [(number, re.sub(r"`[^`]*`", "`code`", text)) for number, text in found]
    return [(number, re.sub(r"\]\([^)]*\)", "]", text)) for number, text in without_code]


def dialect_in(text: str, *, tables: bool = True) -> list[str]:
    """Return each word of the dialect in a page, with its line and what to write instead."""
    return [
        f"line {number}: {match[0]!r}: write {word.instead}"
        for number, sentence in prose_of(text, tables=tables)
        for word in DIALECT
        for match in re.finditer(rf"\b(?:{word.pattern})\b", sentence, re.IGNORECASE)
    ]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_plain_words(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert dialect_in(text, tables=page not in MEASURED) == []


@pytest.mark.parametrize("word", DIALECT, ids=lambda word: word.example)
def test_each_word_is_found(word: Word) -> None:
    assert any(word.instead in line for line in dialect_in(word.example))


@pytest.mark.parametrize("sentence", ALLOWED)
def test_standard_terms_are_not_found(sentence: str) -> None:
    assert dialect_in(sentence) == []


@pytest.mark.parametrize("page", PAGES)
def test_a_word_added_to_a_page_is_found(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    (found,) = dialect_in(f"{text}\nOne more line:\nit is cut here.\n", tables=page not in MEASURED)
    assert "'cut'" in found


def test_code_is_not_prose() -> None:
    generated = "<!-- the tables of x -->\n\n| cut |\n\n<!-- end of the tables -->"
    page = f"a `cut`\n\n```sh\ncut -f1\n```\n\n{generated}\n\n| b | said |\n"
    assert dialect_in(page) == ["line 13: 'said': write report, print, explain, state"]
    assert dialect_in(page, tables=False) == []


def test_a_phrase_is_found_across_lines() -> None:
    assert dialect_in("* Both are held\n  against each other.") != []
