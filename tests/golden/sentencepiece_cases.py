"""sentencepiece/KIND.model and KIND.json: what Google's sentencepiece package says.

    python tests/golden/sentencepiece_cases.py                 # KIND.json of the models that are there
    python tests/golden/sentencepiece_cases.py TEXT_FOLDER     # the models, too, trained on TESSERA_DATA_DIR/text

KIND.json: "texts": each {"text", "ids", "decoded"}; "pieces": all pieces; "special": ids of bos, eos, pad and unk, -1 for none.
"bpe" has the settings of Llama 2 (byte fallback, digits apart, no normalization), "unigram" those of T5 (no bos, a pad,
its rules of normalization cut to a few).
"""

import json
import sys
import tempfile
from pathlib import Path

import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from tokenizer_cases import FIXED, hostile

OUT = Path(__file__).parent / "sentencepiece"
# Code points, and what they become: white space, ligatures, an accent that is composed.
RULES = "9\t20\nA\t20\nD\t20\nA0\t20\n3000\t20\n2460\t31\nFB01\t66 69\nFB02\t66 6C\n65 301\tE9\n41 30A\tC5\n200B\t\n"


def train(texts):
    with tempfile.TemporaryDirectory() as folder:
        source, rules = Path(folder) / "text.txt", Path(folder) / "rules.tsv"
        lines = (texts / "tinyshakespeare.txt").read_text(encoding="utf-8").splitlines()[:6000]
        source.write_text("\n".join(lines), encoding="utf-8")
        rules.write_text(RULES, encoding="utf-8")
        same = dict(input=str(source), num_threads=1, minloglevel=2)
        sentencepiece.SentencePieceTrainer.train(
            **same, model_prefix=str(OUT / "bpe"), model_type="bpe", vocab_size=700, byte_fallback=True, split_digits=True,
            normalization_rule_name="identity", remove_extra_whitespaces=False, allow_whitespace_only_pieces=True,
            user_defined_symbols=["<mask>"])
        sentencepiece.SentencePieceTrainer.train(
            **same, model_prefix=str(OUT / "unigram"), model_type="unigram", vocab_size=500, pad_id=0, eos_id=1, unk_id=2,
            bos_id=-1, normalization_rule_tsv=str(rules))
    for path in OUT.glob("*.vocab"):
        path.unlink()
    # Where text and model lay is no business of the model.
    for path in OUT.glob("*.model"):
        model = sentencepiece_model_pb2.ModelProto.FromString(path.read_bytes())
        for name in ("input", "model_prefix"):
            model.trainer_spec.ClearField(name)
        model.normalizer_spec.ClearField("normalization_rule_tsv")
        path.write_bytes(model.SerializeToString())


def write_all():
    for path in sorted(OUT.glob("*.model")):
        processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
        cases = [{"text": text, "ids": processor.encode(text), "decoded": processor.decode(processor.encode(text))}
                 for text in FIXED + hostile(36, 7)]
        value = {
            "texts": cases,
            "pieces": [processor.id_to_piece(i) for i in range(processor.get_piece_size())],
            "special": {"bos": processor.bos_id(), "eos": processor.eos_id(), "pad": processor.pad_id(), "unk": processor.unk_id()},
            # Control pieces between others, which no text gives.
            "controls": {"ids": [5, processor.eos_id(), 300, processor.unk_id(), 301],
                         "decoded": processor.decode([5, processor.eos_id(), 300, processor.unk_id(), 301])},
        }
        path.with_suffix(".json").write_text(
            json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(Path(sys.argv[1]))
    write_all()
