"""Members that are language models: one frozen base, one adapter each.

Importing this requires the extra `llm`.
"""

from evogrpo.extras import require

require("A language model", "transformers", "peft", "accelerate")
