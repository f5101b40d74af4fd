"""What a suite may say: its keys, their types and bounds."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from harness.records import Claim
from harness.suite.bounds import MAX_ROUNDS


class Model(BaseModel):
    """Frozen, strict, without unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Suite(Model):
    """What a suite file may say."""

    title: str = Field(min_length=1, max_length=200, description="heading of the tables")
    workload: str = Field(
        description="decoder, documents, causal_lm, causal_lm_documents, scoring, temporal, or one of your own"
    )
    places: list[str] = Field(["torch/cpu"], min_length=1, max_length=16, description="backend/device of each")
    corpus: str | None = Field(None, description="by default standard_library for tokens, generated for frames")
    tokenizer: Literal["bytes", "words", "bpe"] = Field("bpe", description="how a text becomes tokens")
    shape: dict[str, Any] = Field(default_factory=dict, description="sizes of the workload, or a preset of them")
    at: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="other settings for places that match a pattern"
    )
    each: list[dict[str, Any]] = Field(
        default_factory=list,
        max_length=100,
        description="settings to take in turn: shapes, with a corpus, tokenizer or budget of their own",
    )
    budget_gib: float | None = Field(None, ge=1 / 64, le=1 << 16, description="memory above the settled base")
    strategies: list[Any] = Field(
        min_length=1, max_length=1000, description="rows: a name, {name: knobs}, or a list that is applied in order"
    )
    ranks: int | list[int] = Field(2, description="on how many ranks rows run whose strategies divide the run")
    rounds: int = Field(
        3, ge=0, le=MAX_ROUNDS, description="time rounds at most; rows whose time is decided leave earlier"
    )
    timing_minutes: float = Field(
        10, gt=0, le=1440, description="worker minutes that the times of a comparison may take"
    )
    steps: int | None = Field(None, ge=2, le=10_000, description="timed steps; found by a pilot where not given")
    warmup: int | None = Field(None, ge=0, le=1000, description="untimed steps; found by a pilot where not given")
    memory_steps: int = Field(3, ge=2, le=1000, description="steps of the run whose peak is taken")
    seed: int = Field(0, ge=0, le=1 << 31, description="of the parameters, the data and the order of the rounds")
    timeout_seconds: float = Field(600, gt=0, le=1 << 20, description="how long one process may take")
    claims: list[Claim] = Field(default_factory=list, description="sentences that the measured figures decide")
