"""What the texts of published rows mean: one that is not known is refused, and never taken for the usual."""

import ast
import re
from typing import Any

import torch

from published.machine import Refused

DTYPES = {
    **dict.fromkeys(("bfloat16", "bf16"), torch.bfloat16),
    **dict.fromkeys(("float16", "fp16", "half"), torch.float16),
    **dict.fromkeys(("float32", "fp32", "float"), torch.float32),
}
NOTHING = {"", "none", "no", "off", "false", "0"}
"""How a row says that a run does without something."""
OPTIMIZERS = {name.lower(): name for name in ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adamax", "NAdam", "RAdam")}
"""Those of torch by their names in small letters, as the arguments of trainers have them."""


def dtype_of(text: Any) -> torch.dtype:
    """Return the type that a text names. Raises Refused."""
    name = str(text).strip().lower().removeprefix("torch.")
    if name not in DTYPES:
        raise Refused(f"the type '{text}' is not known: write one of bfloat16, float16 and float32")
    return DTYPES[name]


def loaded_type(row: dict[str, Any]) -> torch.dtype:
    """Return the type that the weights of a row have before anything is made of them. Raises Refused."""
    text = str(row["param_dtype"])
    first = text.strip().split(" ")[0].rstrip(",;")
    return compute_type(row) if first.lower().startswith("nf4") else dtype_of(first)


def compute_type(row: dict[str, Any]) -> torch.dtype:
    """Return the type that weights in 4 bits are made wide to; that of float16 where the row does not say."""
    text = str(row["param_dtype"]).lower()
    named = re.search(r"compute (\w+)", text)
    return dtype_of(named[1]) if named else torch.bfloat16 if "bf16" in text or "bfloat16" in text else torch.float16


def is_quantised(row: dict[str, Any]) -> bool:
    """Check whether the base lies in 4 bits. Raises Refused for another coding than NF4."""
    text = str(row.get("quant") or "").strip().lower()
    if text in NOTHING:
        return False
    if text.startswith("nf4"):
        return True
    raise Refused(f"weights in '{row['quant']}' are not rebuilt: write nf4 or none")


def is_checkpointed(row: dict[str, Any]) -> bool:
    """Check whether layers are recomputed in the backward pass."""
    return str(row.get("grad_ckpt") or "").strip().lower() not in NOTHING


def autocast_type(row: dict[str, Any]) -> torch.dtype | None:
    """Return the type of a row's autocast, None where it has none. Raises Refused."""
    text = str(row.get("autocast") or "").strip().lower()
    return None if text in NOTHING else dtype_of(text)


def attention(row: dict[str, Any]) -> str:
    """Return the attention of a row in small letters, empty where it names none. Raises Refused."""
    text = str(row.get("attention") or "").strip().lower()
    is_known = text in NOTHING or "eager" in text or ("sdpa" in text and ".math" not in text)
    if not is_known:
        raise Refused(f"the attention '{row['attention']}' is not rebuilt: write eager or sdpa")
    return text


def iterations(row: dict[str, Any]) -> tuple[int, str]:
    """Return how many steps a loop makes, and what it says of them, in single blanks. Raises Refused."""
    text = " ".join(str(row["steps"]).lower().split())
    count = re.match(r"[1-9]\d*\b", text)
    if count is None:
        raise Refused(f"'{row['steps']}' does not say how many steps are made: begin with their number")
    return int(count[0]), text


def count(row: dict[str, Any], name: str) -> int:
    """Return a size of a row. Raises Refused where it is no whole number above 0."""
    value = row[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise Refused(f"its {name} is {value!r}: write a whole number above 0")
    return value


def optimizer(text: Any) -> tuple[str, dict[str, Any]]:
    """Return the class of torch that a text names, and the arguments that it gives. Raises Refused."""
    named = re.match(r"(torch\.optim\.)?(\w+)(\((?:[^()]|\([^()]*\))*\))?", str(text).strip())
    of_torch, name, arguments = named.groups("") if named else ("", "", "")
    known = name if of_torch else OPTIMIZERS.get(name.lower().removesuffix("_torch"), "")
    if not hasattr(torch.optim, known):
        raise Refused(f"the optimizer '{text}' is not rebuilt")
    try:
        call: Any = ast.parse(f"{known}{arguments or '()'}", mode="eval").body
        if call.args:
            raise ValueError(call.args)
        return known, {each.arg: ast.literal_eval(each.value) for each in call.keywords}
    except (SyntaxError, ValueError):
        raise Refused(f"the arguments of the optimizer '{text}' cannot be read: write NAME=NUMBER") from None
