"""tokenizers/components.json: each kind of normalizer, pre-tokenizer, post-processor and decoder by itself.

    python tests/golden/tokenizer_components.py

A list of {"name", "file": a tokenizer.json, "texts": [{"text", "ids", "offsets"}], "decoded": [[ids, text]]}, as
HuggingFace's tokenizers package has them. The vocabulary of a normalizer's file are the characters that come of
the texts, that of a pre-tokenizer's the words, so that ids say what they are.
"""

import base64
import json
from pathlib import Path

from tokenizer_cases import CHARSMAP
from tokenizers import Tokenizer

OUT = Path(__file__).parent / "tokenizers" / "components.json"
SPACE = "\u2581"

TEXTS = [
    "",
    " ",
    "  Hello,  World!\t42\n",
    "it's 3.14 caf\u00e9 cafe\u0301 \u212b \ufb01 \u1e9b\u0323",
    "\u4e2d\u6587a\u0130\u03a3\u00df \U0002b81f\U0002b920",
    "a\u200bb\u0000c\u007f\u00a0d\u2028e\ufffd\u0085\u3000",
    "--a--b- \u0661\u00b2x_y\u2014z",
    "\u0958\u0301\u0323\uac01 \u1112\u1161\u11ab\U0001f600\U0001f3fd",
    "  \u2581lead\u2581 trail  ",
]

NORMALIZERS = [
    *({"type": kind} for kind in ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Nmt", "StripAccents", "ByteLevel")),
    {"type": "Strip", "strip_left": True, "strip_right": False},
    {"type": "Strip", "strip_left": False, "strip_right": True},
    {"type": "Strip", "strip_left": True, "strip_right": True},
    {"type": "Prepend", "prepend": SPACE + "x"},
    {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
    {"type": "Replace", "pattern": {"Regex": "[a-e]+|\\s{2,}"}, "content": ""},
    {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(CHARSMAP).decode()},
    *({"type": "BertNormalizer", "clean_text": clean, "handle_chinese_chars": chinese, "strip_accents": accents,
       "lowercase": lower}
      for clean, chinese, accents, lower in ((True, True, None, True), (True, True, None, False),
                                             (False, True, False, True), (True, False, True, False),
                                             (False, False, False, False))),
    {"type": "Sequence", "normalizers": [{"type": "NFD"}, {"type": "StripAccents"}, {"type": "Lowercase"}]},
]

BEHAVIORS = ("Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous")
PRE_TOKENIZERS = [
    *({"type": kind} for kind in ("BertPreTokenizer", "Whitespace", "WhitespaceSplit")),
    *({"type": "ByteLevel", "add_prefix_space": prefix, "trim_offsets": trim, "use_regex": regex}
      for prefix, trim, regex in ((True, True, True), (False, False, True), (False, True, False))),
    *({"type": "Metaspace", "replacement": SPACE, "prepend_scheme": scheme, "split": split}
      for scheme, split in (("always", True), ("never", True), ("first", False))),
    *({"type": "Split", "pattern": {"String": "-"}, "behavior": behavior, "invert": False} for behavior in BEHAVIORS),
    *({"type": "Split", "pattern": {"Regex": "[a-z]+"}, "behavior": behavior, "invert": True}
      for behavior in BEHAVIORS),
    *({"type": "Punctuation", "behavior": behavior} for behavior in BEHAVIORS),
    *({"type": "Digits", "individual_digits": one} for one in (True, False)),
    {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"},
                                           {"type": "Digits", "individual_digits": True}]},
]

# What expressions are made of, each by itself, on texts with a character of each class.
PATTERN_TEXTS = ["aA1 \t\u2581\u00e9_-.x{\n\u4e2d\u0661\u0007\u00a0 fF9g", "ab  ababb\r\n\u000bZz.\\]"]
PATTERNS = [r"\s", r"[\s.]", r"\S", r"\w", r"[\w-]", r"\W", r"\h", r"[\hx]", r"\H", r"\d", r"\D", r"\n", r"\r", r"\t",
            r"\v", r"\f", r"\x{2581}", r"[\x{41}-\x{5a}]", r"\x41", r"[\x09\x20]", r"\.", r"\\", r"\{", r"[\]\-]",
            r"\p{L}", r"\P{L}", r"\p{^L}", r"\P{^L}", r"[\p{Lu}\p{N}]", r"\p{Han}", r"\p{Nd}+", r"[^a-z]", r"[a-c]+",
            r"(?:ab)+", r"(ab){2}", r"b{1,}", r"b{1,2}", r"a(?=b)", r"a(?!b)", r"(?<=a)b", r"(?<!a)b", r"(?i:z)", r"(?>a|ab)b",
            r"a*?b", r"b+?", r"a?b", r"a|b"]

TOKENS = ["[UNK]", SPACE + "Hello", SPACE, "##world", ",", "it", "'s", "<0xE4>", "<0xB8>", "<0xAD>", "<0xFF>", "!",
          "end</w>", "\u0120caf\u00c3\u00a9", "a b", SPACE + SPACE + "x", "n't", ".", "do"]
SEQUENCES = [[1, 3, 4, 2, 3, 11], [5, 6, 17], [7, 8, 9, 10, 7], [12, 12, 1], [13, 13, 14], [15, 2], [18, 16, 11, 11],
             [], [2], [7, 8], [1, 1], [3]]
DECODERS = [
    {"type": "ByteFallback"},
    {"type": "Fuse"},
    {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    *({"type": "WordPiece", "prefix": "##", "cleanup": cleanup} for cleanup in (True, False)),
    *({"type": "Metaspace", "replacement": SPACE, "prepend_scheme": scheme, "split": True}
      for scheme in ("always", "never", "first")),
    *({"type": "Strip", "content": "!", "start": start, "stop": stop} for start, stop in ((1, 0), (0, 1), (2, 2))),
    {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
    {"type": "BPEDecoder", "suffix": "</w>"},
    {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
                                      {"type": "ByteFallback"}, {"type": "Fuse"},
                                      {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
]


def file_of(model, **parts):
    file = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
            "pre_tokenizer": None, "post_processor": None, "decoder": None, "model": model}
    file.update(parts)
    return file


def characters(vocabulary):
    return {"type": "BPE", "dropout": None, "unk_token": "[UNK]", "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(vocabulary)}, "merges": []}


def words(vocabulary):
    return {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100, "vocab": {token: i for i, token in enumerate(vocabulary)}}


def name_of(part):
    rest = [str(value) for key, value in part.items() if key != "type" and not isinstance(value, list)]
    return " ".join([part["type"], *rest])[:80]


def read(part, **parts):
    """A tokenizer of the part, or None where the package does not know it."""
    try:
        return Tokenizer.from_str(json.dumps(file_of(characters(["[UNK]"]), **parts)))
    except Exception as error:
        print("the package does not read", name_of(part), error)
        return None


def texts_of(file, texts=TEXTS):
    tokenizer = Tokenizer.from_str(json.dumps(file))
    cases = []
    for text in texts:
        encoding = tokenizer.encode(text)
        cases.append([text, encoding.ids, [place for pair in encoding.offsets for place in pair]])
    return cases


def decoded_by(tokenizer, ids):
    """The text, or None where the package ends in a panic: a Strip of more than there is."""
    try:
        return tokenizer.decode(ids, skip_special_tokens=False)
    except BaseException:
        return None


def main():
    found = []
    for part in NORMALIZERS:
        tokenizer = read(part, normalizer=part)
        if tokenizer is None:
            continue
        seen = sorted({c for text in TEXTS for c in tokenizer.normalizer.normalize_str(text)})
        file = file_of(characters(["[UNK]", *seen]), normalizer=part)
        found.append({"name": "normalizer " + name_of(part), "file": file, "texts": texts_of(file), "decoded": []})
    for part in PRE_TOKENIZERS:
        tokenizer = read(part, pre_tokenizer=part)
        if tokenizer is None:
            continue
        seen = sorted({word for text in TEXTS for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)})
        file = file_of(words(["[UNK]", *seen]), pre_tokenizer=part)
        found.append({"name": "pre-tokenizer " + name_of(part), "file": file, "texts": texts_of(file), "decoded": []})
    for pattern in PATTERNS:
        part = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        tokenizer = read(part, pre_tokenizer=part)
        if tokenizer is None:
            continue
        file = file_of(words(["[UNK]"]), pre_tokenizer=part)
        found.append({"name": "expression " + pattern, "file": file, "texts": texts_of(file, PATTERN_TEXTS),
                      "decoded": []})
    for part in DECODERS:
        if read(part, decoder=part) is None:
            continue
        file = file_of(characters(TOKENS), decoder=part)
        tokenizer = Tokenizer.from_str(json.dumps(file))
        decoded = [[ids, text] for ids in SEQUENCES if (text := decoded_by(tokenizer, ids)) is not None]
        found.append({"name": "decoder " + name_of(part), "file": file, "texts": [], "decoded": decoded})
    lines = [json.dumps(one, ensure_ascii=True, separators=(",", ":")) for one in found]
    OUT.write_text("[\n" + ",\n".join(lines) + "\n]\n")
    print(len(found), "components,", OUT.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
