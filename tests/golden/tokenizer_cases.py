"""tokenizers/FAMILY/tokenizer.json and cases.json: what HuggingFace's tokenizers package says.

    python tests/golden/tokenizer_cases.py                 # cases.json of the files that are there
    python tests/golden/tokenizer_cases.py TEXT_FOLDER     # the files, too; training breaks ties by chance

The files have the settings of the families' published ones and small vocabularies, trained on
English prose of a folder (TESSERA_DATA_DIR/text) and on the hostile strings below. cases.json:
"texts": each {"text", "ids", "offsets", "plain": the ids without special tokens where they differ,
"decoded", "skipped": decoded without special tokens where that differs}; "pairs": {"first",
"second", "ids", "type_ids", "mask"}; overflow.json has what truncation takes away; "settings": {"truncation", "padding", "texts", "batch"}.
"""

import base64
import json
import random
import sys
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers import processors, trainers

OUT = Path(__file__).parent / "tokenizers"
SPACE = "\u2581"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")

# A map of SentencePiece (normalization_rule_tsv) with twenty rules: white space, ligatures, a + U+0300...
CHARSMAP = base64.b64decode(
    "AAQAAAAgAAAJCQAACgUAAAEAAIDMBAIAgA0AABgAAIDMOAIAgQUAABsAAIAAAACABQAAgB4AAIC9GQAAiQkAAIR4AgCgTQAAgIgDAOEQAgCF"
    "mAIAoQUAACUAAICDVQAApj0AACIAAIAVAACAqw0AAKcdAAANAACArV0AAIt1AACg+QAAgNQCAAMAAICABAIAgIEAAIRUAgCFZAIAgQUAABIA"
    "AICsPAIAoQ0AAAsAAIC/hQAALQAAACwAAAAvAAAALgAAADEAAACROAIAMwAAADIAAAA1AAAANAAAADcAAAA2AAAAvMACADgAAAA7AAAAOgAA"
    "AD0AAAA8AAAAPwAAALusAgBBAAAAQAAAAEMAAABCAAAARQAAAEQAAABHAAAARgAAAEkAAABIAAAASwAAAEoAAABNAAAATAAAAE8AAABOAAAA"
    "UQAAAFAAAABTAAAAUgAAAFUAAABUAAAAVwAAAFYAAABZAAAAWAAAAFsAAABaAAAAXQAAAFwAAABfAAAAXgAAAGEAAABgAAAAYwAAAGIAAABl"
    "AAAAZAAAAGcAAABmAAAAaQAAAGGEAgBrAAAAagAAAG0AAABlmAIAbwAAAG4AAABxAAAAcAAAAHMAAAByAAAAdQAAAHQAAAB3AAAAdgAAAHkA"
    "AAB4AAAAewAAAHoAAAB9AAAAfAAAAH8AAAB+AAAAgQAAAIAAAACDAAAAggAAAIUAAACEAAAAhwAAAIYAAACJAAAAiAAAAIsAAACKAAAAjQAA"
    "AIwAAACPAAAAjgAAAJEAAACQAAAAkwAAAJIAAACVAAAAlAAAAJcAAACWAAAAmQAAAJgAAACbAAAAmgAAAJ0AAACcAAAAnwAAAJ4AAAChAAAA"
    "oAAAAKMAAACiAAAApQAAAKQAAACnAAAApgAAAKkAAACoAAAAqwAAAKoAAACtAAAArAAAAK8AAACuAAAAsQAAALAAAACzAAAAsgAAALUAAAC0"
    "AAAAtwAAALYAAAC5AAAAuAAAALsAAAC6AAAAvQAAALwAAAC/AAAAvgAAAMEAAADAAAAAwwAAAMIAAADFAAAAxAAAAMcAAADGAAAAyQAAAMgA"
    "AADC6AEAygAAAM0AAADFKAEAzwAAAM4AAADRAAAA0AAAANMAAADSAAAA1QAAANQAAADXAAAA1gAAANkAAADYAAAA2wAAANoAAADdAAAA3AAA"
    "AN8AAADeAAAA4QAAAOAAAADjAAAA4gAAAOUAAADkAAAA5wAAAO+MAQDpAAAA4YgBAOIoAQDjJAEA7QAAAOwAAADvAAAA7gAAAPEAAADwAAAA"
    "8wAAAPIAAAD1AAAA9AAAAPcAAAD2AAAA+QAAAPgAAAD7AAAA+gAAAP0AAAD8AAAA/wAAAP4AAAAAIAAxADHigYQyAEEAVklJSQBmaQDDhQDD"
    "oADDqQDKvG4AzqkA6rCAAA=="
)

# ---- Texts --------------------------------------------------------------------------------------

POOLS = [
    lambda r: chr(r.randrange(0x20, 0x7F)),
    lambda r: r.choice(" \t\n\r\u00a0\u2003\u3000\u0085\u2028\u200b\u180e\v\f"),
    lambda r: chr(r.randrange(0xA1, 0x250)),
    lambda r: chr(r.randrange(0x300, 0x34F)),  # combining marks
    lambda r: chr(r.randrange(0x391, 0x3C9)),
    lambda r: chr(r.randrange(0x410, 0x450)),
    lambda r: chr(r.randrange(0x5D0, 0x5EB)),
    lambda r: chr(r.randrange(0x621, 0x64B)),
    lambda r: chr(r.randrange(0x905, 0x94E)),
    lambda r: chr(r.randrange(0x4E00, 0x9FA6)),
    lambda r: chr(r.randrange(0x3041, 0x30FF)),
    lambda r: chr(r.randrange(0xAC00, 0xD7A4)),
    lambda r: chr(r.randrange(0x1100, 0x1113)) + chr(r.randrange(0x1161, 0x1176)),
    lambda r: chr(r.randrange(0x1F300, 0x1F64F)),
    lambda r: r.choice("\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea \u2764\ufe0f".split()),
    lambda r: chr(r.choice([0, 1, 7, 8, 0x1B, 0x7F, 0x80, 0x9F, 0xAD, 0xFEFF, 0xFFFD, 0xFFFF])),
    lambda r: chr(r.choice([0xD7FF, 0xE000, 0xF8FF, 0x10000, 0x10FFFF, 0xE0001, 0x1D400, 0x20000])),
    lambda r: r.choice("\ufb01 \u2460 \uff21 \u1e9e \u0130 \u01c5 \u00df \u2126 \u212b \u0344 \u1e69 \u03a3 \u0149 \u017f".split()),
    lambda r: r.choice("\u0660 \u00b2 \u00bd \u2167 \u3007 \u0bf0 7 42 2026".split()),
    lambda r: r.choice(["'s", "'T", "'re", "'LL", "n't", " .", " ,", "\\u00e9", "%20", "&amp;", "\\x00"]),
    lambda r: r.choice(["<s>", "</s>", "<unk>", "[MASK]", "<|endoftext|>", "<|im_start|>", "<0x0A>", "[CLS]",
                        "<extra_id_0>", "\u2581", "##ing", "Day", "yes", "\u0120"]),
    lambda r: r.choice(" a\u00e9\u4e2d\u2581\U0001f600") * r.randrange(2, 60),
    lambda r: r.choice(["the ", "and", " of", "ing ", "War", " Peace", "Pierre", " 1812"]),
]


def hostile(count, seed):
    """Strings of characters that tokenizers treat in different ways."""
    r = random.Random(seed)
    texts = []
    for _ in range(count):
        parts = [r.choice(POOLS) for _ in range(r.randrange(1, 4))]
        texts.append("".join(r.choice(parts)(r) for _ in range(r.randrange(1, 14))))
    return texts


FIXED = [
    "", " ", "  ", "\n", " \n \n", "Hello world", " Hello  world! ", "I've 3 cats; they'll eat 12345 fish.",
    "caf\u00e9 cafe\u0301 \u00c5ngstr\u00f6m \ufb01ne \u2460", "\u4e2d\u6587 \u65e5\u672c\u8a9e \ud55c\uad6d\uc5b4",
    "\u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627", "a\u0300\u0301\u0323b", "x" * 120, " " * 70,
    "ab<s>cd </s> [MASK] e", "It is Day or  Day. Days DAY day", "yes  <unk>no", "\u2581\u2581a \u2581b",
    "tab\tnew\nline\r\nend\r", "\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f600\U0001f600",
    # What Unicode has changed since 8: categories, and characters that came later.
    "a\u166db a\u1734b a\u1885b a\ua9bdb a\U000111c9b a\u1cf2b", "a\u08e2b a\u0890b \u1dfbe\u0301 a\U00011a33b",
    "a \u180e b\u180ec \u180e\u180e", "yes  <mask> no <mask>\t<mask>", "\U0002b820\U0002b91fa\U0002b920b",
]

# ---- Families -----------------------------------------------------------------------------------


def byte_level_bpe(pattern, corpus, size, specials, normalizer=None, ignore_merges=False):
    t = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    if normalizer is not None:
        t.normalizer = normalizer
    if pattern is None:
        t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        t.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Split(Regex(pattern), "isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=False),
        ])
    t.train_from_iterator(corpus, trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    t.decoder = decoders.ByteLevel()
    t.add_special_tokens(specials)
    return t


def gpt2(corpus):
    t = byte_level_bpe(None, corpus, 1200, ["<|endoftext|>"])
    t.post_processor = processors.ByteLevel(trim_offsets=False)
    return t


def roberta(corpus):
    t = byte_level_bpe(None, corpus, 900, ["<s>", "<pad>", "</s>", "<unk>"])
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    t.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    t.post_processor = processors.RobertaProcessing(
        ("</s>", t.token_to_id("</s>")), ("<s>", t.token_to_id("<s>")))
    return t


def gpt_neox(corpus):
    t = byte_level_bpe(None, corpus, 900, ["<|endoftext|>", "<|padding|>"], normalizers.NFC())
    t.add_tokens([AddedToken(" " * n, normalized=True) for n in (24, 12, 8, 4, 2)])
    t.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=True)
    return t


def phi(corpus):
    t = byte_level_bpe(None, corpus, 900, ["<|endoftext|>"])
    t.add_tokens([AddedToken("\t" * n, normalized=False) for n in (9, 4, 2)])
    t.add_tokens([AddedToken(" " * n, normalized=False) for n in (31, 9, 2)])
    t.post_processor = processors.ByteLevel(trim_offsets=True)
    return t


def llama3(corpus):
    t = byte_level_bpe(LLAMA3, corpus, 1500, ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"],
                       ignore_merges=True)
    begin = t.token_to_id("<|begin_of_text|>")
    t.post_processor = processors.Sequence([
        processors.ByteLevel(trim_offsets=True, use_regex=True),
        processors.TemplateProcessing(
            single="<|begin_of_text|> $A", pair="<|begin_of_text|> $A <|begin_of_text|>:1 $B:1",
            special_tokens=[("<|begin_of_text|>", begin)]),
    ])
    return t


def qwen2(corpus):
    t = byte_level_bpe(QWEN2, corpus, 1200, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], normalizers.NFC())
    t.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=False)
    t.enable_padding(direction="left", pad_id=t.token_to_id("<|endoftext|>"), pad_token="<|endoftext|>")
    return t


def sentence_bpe(corpus, size, specials):
    """BPE as conversions of SentencePiece have it: a word begins with its space, bytes fall back."""
    t = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    t.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    names = specials + [f"<0x{byte:02X}>" for byte in range(256)]
    t.train_from_iterator(corpus, trainers.BpeTrainer(
        vocab_size=size, special_tokens=names, limit_alphabet=90, show_progress=False))
    raw = json.loads(t.to_str())
    raw["added_tokens"] = [token for token in raw["added_tokens"] if token["content"] in specials]
    raw["pre_tokenizer"] = None
    t = Tokenizer.from_str(json.dumps(raw))
    t.decoder = decoders.Sequence([
        decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return t


def begin_with(t, token):
    t.post_processor = processors.TemplateProcessing(
        single=f"{token} $A", pair=f"{token} $A {token}:1 $B:1", special_tokens=[(token, t.token_to_id(token))])
    return t


def llama2(corpus):
    t = sentence_bpe(corpus, 1300, ["<unk>", "<s>", "</s>"])
    t.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    return begin_with(t, "<s>")


def mistral(corpus):
    t = sentence_bpe(corpus, 1000, ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"])
    t.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    t.add_tokens([AddedToken("Day", single_word=True, normalized=True), AddedToken("yes", rstrip=True)])
    raw = json.loads(t.to_str())
    raw["model"]["merges"] = [" ".join(pair) for pair in raw["model"]["merges"]]  # the older form
    return begin_with(Tokenizer.from_str(json.dumps(raw)), "<s>"), raw["model"]["merges"]


def gemma(corpus):
    t = sentence_bpe(corpus, 1000, ["<pad>", "<eos>", "<bos>", "<unk>"])
    t.normalizer = normalizers.Replace(" ", SPACE)
    t.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous", invert=False)
    t.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    t.add_tokens([AddedToken("\n" * n, normalized=False) for n in (4, 3, 2)])
    t.add_tokens([AddedToken(SPACE * n, normalized=False) for n in (5, 2)])
    t.enable_truncation(40, direction="left")
    return begin_with(t, "<bos>")


def bert(corpus, lowercase):
    t = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    t.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    t.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    t.train_from_iterator(corpus, trainers.WordPieceTrainer(
        vocab_size=1300, special_tokens=names, limit_alphabet=300, show_progress=False))
    t.decoder = decoders.WordPiece(prefix="##")
    ids = {name: t.token_to_id(name) for name in names}
    if lowercase:
        t.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[("[CLS]", ids["[CLS]"]), ("[SEP]", ids["[SEP]"])])
    else:
        t.post_processor = processors.BertProcessing(("[SEP]", ids["[SEP]"]), ("[CLS]", ids["[CLS]"]))
        t.enable_truncation(24)
        t.enable_padding(pad_id=ids["[PAD]"], pad_token="[PAD]", pad_to_multiple_of=8)
    return t


def t5(corpus):
    t = Tokenizer(models.Unigram())
    t.normalizer = normalizers.Sequence([
        normalizers.Precompiled(CHARSMAP), normalizers.Strip(left=False, right=True),
        normalizers.Replace(Regex(" {2,}"), SPACE)])
    t.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="always")])
    t.train_from_iterator(corpus[:4000], trainers.UnigramTrainer(
        vocab_size=1000, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False))
    t.add_special_tokens([AddedToken(f"<extra_id_{n}>", rstrip=n == 1) for n in range(3)])
    t.decoder = decoders.Metaspace(prepend_scheme="always")
    t.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", t.token_to_id("</s>"))])
    return t


def clip(corpus):
    """What the others leave out: suffixes of words, accents, digits, punctuation, white space."""
    t = Tokenizer(models.BPE(unk_token="[UNK]", end_of_word_suffix="</w>"))
    t.normalizer = normalizers.Sequence([
        normalizers.Strip(), normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase(),
        normalizers.NFC()])
    t.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Whitespace(), pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.Punctuation("contiguous")])
    t.train_from_iterator(corpus, trainers.BpeTrainer(
        vocab_size=900, special_tokens=["[UNK]"], limit_alphabet=120, end_of_word_suffix="</w>",
        show_progress=False))
    t.decoder = decoders.BPEDecoder(suffix="</w>")
    return t


def families(folder):
    prose = []
    for name in ("war-and-peace.txt", "wikitext2-raw-valid.txt"):
        prose += (folder / name).read_text(encoding="utf-8").split("\n")
    corpus = [line for line in prose if line][:6000] + hostile(1500, 1)
    made = {
        "gpt2": gpt2(corpus), "roberta": roberta(corpus), "gpt_neox": gpt_neox(corpus), "phi": phi(corpus),
        "llama3": llama3(corpus), "qwen2": qwen2(corpus), "llama2": llama2(corpus), "gemma": gemma(corpus),
        "bert": bert(corpus, True), "bert_cased": bert(corpus, False), "t5": t5(corpus), "clip": clip(corpus),
    }
    made["mistral"], merges = mistral(corpus)
    files = {name: json.loads(t.to_str()) for name, t in made.items()}
    files["mistral"]["model"]["merges"] = merges
    return files


# ---- Expected -----------------------------------------------------------------------------------


def case(t, text):
    encoding = t.encode(text)
    result = {"text": text, "ids": encoding.ids, "offsets": [n for pair in encoding.offsets for n in pair]}
    plain = t.encode(text, add_special_tokens=False).ids
    if plain != encoding.ids:
        result["plain"] = plain
    result["decoded"] = t.decode(encoding.ids, skip_special_tokens=False)
    skipped = t.decode(encoding.ids)
    if skipped != result["decoded"]:
        result["skipped"] = skipped
    return result


def pair_case(t, first, second):
    e = t.encode(first, second)
    return {"first": first, "second": second, "ids": e.ids, "type_ids": e.type_ids,
            "mask": e.special_tokens_mask}


def setting_case(t, texts, truncation, padding):
    t.enable_truncation(**truncation)
    t.enable_padding(**padding)
    batch = [{"ids": e.ids, "mask": e.attention_mask} for e in t.encode_batch(texts)]
    t.no_truncation()
    t.no_padding()
    return {"truncation": truncation, "padding": padding, "texts": texts, "batch": batch}


def write(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")


def overflow():
    """overflow.json: {"family", "first", "second"?, "truncation", "padding"?, "all": [{"ids", "type_ids", "offsets", "mask"}]}."""
    long = "The war and the peace of 1812, caf\u00e9s \u4e2d\u6587 and so on."
    cases = []
    for family in ("bert", "roberta", "llama2", "gpt2", "t5"):
        for first, second, truncation, padding in [
            (long, None, dict(max_length=9, stride=2), None), (long, None, dict(max_length=9, stride=3, direction="left"), None),
            (long, None, dict(max_length=8), dict(length=8, pad_id=1)), ("Hello", None, dict(max_length=90, stride=3), None),
            (long, "Who?", dict(max_length=14, stride=1, strategy="only_first"), None),
            ("Who?", long, dict(max_length=15, stride=4, strategy="only_second", direction="left"), dict(direction="left", pad_id=2)),
            (long, long[8:40], dict(max_length=16, stride=2), dict(pad_id=1, pad_to_multiple_of=4)),
        ]:
            t = Tokenizer.from_file(str(OUT / family / "tokenizer.json"))
            t.enable_truncation(**truncation)
            t.no_padding() if padding is None else t.enable_padding(**padding)
            encoding = t.encode(first) if second is None else t.encode(first, second)
            cases.append({"family": family, "first": first, "second": second, "truncation": truncation, "padding": padding, "all": [
                {"ids": e.ids, "type_ids": e.type_ids, "offsets": [x for o in e.offsets for x in o], "mask": e.attention_mask}
                for e in [encoding, *encoding.overflowing]]})
    write(OUT / "overflow.json", cases)


def ties():
    """ties.json: {"model", "texts": {text: ids}}, where several cuts have equal scores."""
    vocab = [("<unk>", 0.0), ("a", -1.0), ("b", -1.0), ("c", -1.0), ("ab", -2.0), ("bc", -2.0), ("abc", -3.0), ("ca", -2.0)]
    t = Tokenizer(models.Unigram(vocab, 0, False))
    texts = ["ab", "bc", "abc", "abca", "cab", "abab", "bcabc", "aabbcc", "caca", "abcabcabc", "xab", "abx", "cabx", ""]
    model = {"type": "Unigram", "unk_id": 0, "byte_fallback": False, "vocab": vocab}
    write(OUT / "ties.json", {"model": model, "texts": {text: t.encode(text).ids for text in texts}})


def write_all():
    overflow()
    ties()
    texts = FIXED + hostile(36, 7)
    for path in sorted(OUT.glob("*/tokenizer.json")):
        t = Tokenizer.from_file(str(path))
        write(path.parent / "cases.json", {
            "texts": [case(t, text) for text in texts],
            "pairs": [pair_case(t, a, b) for a, b in [("Hello", "my world"), ("", "b"), ("the war " * 9, "and " * 4)]],
            "settings": [
                setting_case(t, ["Hello", "my world and peace", ""], dict(max_length=6),
                             dict(direction="left", pad_id=3)),
                setting_case(t, ["Hello", "and so on"], dict(max_length=4, direction="left"),
                             dict(length=9, pad_id=1, pad_to_multiple_of=4)),
            ],
        })


if __name__ == "__main__":
    if len(sys.argv) > 1:
        for name, file in families(Path(sys.argv[1])).items():
            write(OUT / name / "tokenizer.json", file)
    write_all()
