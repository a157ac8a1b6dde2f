"""All features of text requests, in the order in which a request is checked for them."""

from __future__ import annotations

from llm.features.beams import BeamFeature
from llm.features.embeddings import EmbeddingFeature
from llm.features.feature import SequenceFeature
from llm.features.grammars import GrammarFeature
from llm.features.prompt_scores import PromptScoreFeature
from llm.features.text_loras import AdapterFeature

FEATURES: tuple[type[SequenceFeature], ...] = (
    EmbeddingFeature, PromptScoreFeature, AdapterFeature, BeamFeature, GrammarFeature,
)  # fmt: skip
