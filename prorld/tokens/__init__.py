"""Token contexts that only grow: tokenizers, renderers, tool-call parsers and the branch book of one rollout."""
