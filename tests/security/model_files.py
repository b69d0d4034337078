"""Small model folders, written file by file."""

import json
import string

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>", "<user>", "<assistant>")
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_tokenizer(folder, template=TEMPLATE):
    """Write a tokenizer of single characters with a chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *string.printable])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {f"{name}_token": f"<{name}>" for name in ("pad", "bos", "eos", "unk")}
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template, "model_max_length": 256}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def make_hollow_model(folder):
    """Write a tokenizer, and model files without weights."""
    make_tokenizer(folder)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    return folder
