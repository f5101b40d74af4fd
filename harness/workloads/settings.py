"""The settings of every training run on next tokens, whatever the model: batches, objective and optimizer."""

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Text(BaseModel):
    """The sizes and settings that do not depend on the model; a workload adds its own in a subclass."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    vocabulary: int = Field(8192, ge=0, le=1 << 22, description="0: as many tokens as the corpus has")
    batch: int = Field(1, ge=1, le=1 << 20)
    tokens: int = Field(512, ge=1, le=1 << 26, description="tokens in a row of the batch: the context length")
    stride: int | None = Field(None, ge=1, le=1 << 26, description="tokens between two windows; by default no overlap")
    label_smoothing: float = Field(0.0, ge=0, lt=1, description="share of a target that is spread over all tokens")
    z_loss: float = Field(0.0, ge=0, le=1e3, description="weight of the squared log-sum-exp of the logits")
    soft_cap: float = Field(0.0, ge=0, le=1e9, description="logits are bent to stay within it; 0: they are not")
    learning_rate: float = Field(1e-3, ge=0, le=10)
    weight_decay: float = Field(0.01, ge=0, le=1)
    ignored: float = Field(0.0, ge=0, lt=1, description="share of the targets that carry no loss, as padding does")
    evaluations: int = Field(
        0, ge=0, le=1 << 20, description="batches to evaluate on after the steps; then the run is saved and resumed"
    )
    shuffle: bool = Field(False, description="take the windows of each epoch in a random order")
    corpus_tokens: int | None = Field(
        None, ge=2, le=1 << 40, description="tokens of the corpus to hold; by default as many as the steps read"
    )

    @model_validator(mode="after")
    def _fills_a_batch(self) -> "Text":
        needed = self.tokens + (self.batch - 1) * self.step + 1
        if self.corpus_tokens is not None and self.corpus_tokens < needed:
            raise ValueError(
                f"corpus_tokens {self.corpus_tokens:,} hold no batch of {self.batch:,} windows: give {needed:,} or "
                "more, or a smaller batch or window"
            )
        return self

    @property
    def step(self) -> int:
        """Tokens between the starts of two windows."""
        return self.stride or self.tokens
