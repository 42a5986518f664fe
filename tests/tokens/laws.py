"""A rollout at random over a token context, with a book of its own, to see that the laws of tokens hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from prorld.domain.branch import Branch, VersionSpan
from prorld.domain.calls import CallRecord, FinishReason
from prorld.domain.messages import Message, system, tool_result, user
from prorld.errors import RendererError
from prorld.tokens.context import TokenContext
from prorld.tokens.contract import Renderer
from prorld.tokens.verify import verify
from tests.tokens.support import BASH

# Words of a policy: thoughts, calls, other families' markup, half of a token, what is no unicode.
SAYINGS = [
    "<think>", "</think>", "<think>\nhm\n</think>\n\n", "<tool_call>", "</tool_call>", "<|im_", "end|>", "<|eot_id|>",
    '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>', '{"name": "bash", "parameters": {}}',
    '<tool_call>{"name": "bash", "arguments": {"command": "<|im_end|>"}}</tool_call>', "well", "\n\n", "  ", "ch", "r",
    "<｜User｜>", "<start_of_turn>", "é", "日本", "🙂",
]  # fmt: skip
HEARD = [
    *SAYINGS,
    "<|im_end|>",
    "<|im_start|>system\n",
    "</tool_response>",
    "<|observation|>",
    "\ud800",
    "\ue000",
    "a" * 3000,
]

sayings = st.lists(st.one_of(st.sampled_from(SAYINGS), st.text(max_size=4)), max_size=6).map("".join)
heard = st.lists(st.one_of(st.sampled_from(HEARD), st.text(max_size=6)), min_size=1, max_size=6).map("".join)
others = st.builds(
    lambda role, text: (
        tool_result(text, "call_0_0") if role == "tool" else {"user": user, "system": system}[role](text)
    ),
    st.sampled_from(["tool", "tool", "user", "system"]),
    heard.filter(str.strip),
)


class Story:
    """One rollout: what was asked and sampled, kept apart from what the context keeps."""

    def __init__(self, renderer: Renderer, draw: Callable[[st.SearchStrategy[Any]], Any]) -> None:
        self.renderer = renderer
        self.draw = draw
        self.calls: list[CallRecord] = []
        self.made: dict[int, list[tuple[int, list[int], list[int | None]]]] = {}
        self.turn = 0

    def tell(self) -> TokenContext:
        """Open a conversation and let things happen."""
        context = TokenContext(self.renderer)
        try:
            context.apply(context.plan_start(self._opening(), [BASH]), [BASH])
        except RendererError:
            context = TokenContext(self.renderer)
            context.apply(context.plan_start([user("go")], ()))
        for _ in range(self.draw(st.integers(1, 4))):
            self._step(context)
        return context

    def check(self, context: TokenContext) -> None:
        """Prefix law, mask law, version law, and what the trajectory says of itself."""
        assert verify(context.branches, self.calls) == []
        for branch in context.branches:
            mask = bytearray(len(branch))
            for start, ids, versions in self.made.get(branch.index, []):
                end = start + len(ids)
                assert branch.ids[start:end].tolist() == ids
                mask[start:end] = b"\x01" * len(ids)
                assert [_version_at(branch, place) for place in range(start, end)] == versions
            assert branch.mask == mask
        assert sum(branch.sampled for branch in context.branches) == sum(call.sampled_len for call in self.calls)

    def _opening(self) -> list[Message]:
        return [system(self.draw(heard)), user(self.draw(heard))][self.draw(st.integers(0, 1)) :]

    def _step(self, context: TokenContext) -> None:
        self._speak(context)
        what = self.draw(st.sampled_from(["observe", "observe", "observe", "rewrite", "ask"]))
        try:
            if what == "rewrite":
                context.apply(context.plan_rewrite(self._opening(), "compaction"))
                return
            if what == "ask":
                child = context.sub_context()
                child.apply(child.plan_start(self._opening(), ()))
                self._speak(child)
                self._observe(child)
        except RendererError:
            pass
        self._observe(context)

    def _observe(self, context: TokenContext) -> None:
        new = self.draw(st.lists(others, min_size=1, max_size=3))
        before, size = context.current, len(context.current)
        try:
            plan = context.plan_bridge(new) or context.plan_fork(new)
        except RendererError:
            # What a template has no words for at all; it always has some for this.
            plan = context.plan_bridge([user("on")]) or context.plan_fork([user("on")])
        assert len(before) == size
        context.apply(plan)

    def _speak(self, context: TokenContext) -> None:
        """A turn in one call or several, each under versions of its own."""
        parts = self.draw(st.integers(1, 3))
        for part in range(parts):
            finish: FinishReason = (
                "abort" if part < parts - 1 else self.draw(st.sampled_from(["stop", "stop", "length"]))
            )
            ids = self._sampled()
            if finish == "stop":
                ids.append(self.draw(st.sampled_from(self.renderer.stop_token_ids)))
            ids = ids or [self.renderer.stop_token_ids[0]]
            self._take(context, ids, finish, last=part == parts - 1)
        self.turn += 1

    def _sampled(self) -> list[int]:
        """Tokens as policies sample them: seldom those that a tokenizer would choose for their text."""
        text = self.draw(sayings)
        stops = set(self.renderer.stop_token_ids)
        encode = self.renderer.tokenizer.encode
        ids = [token for piece in text for token in encode(piece)] if self.draw(st.booleans()) else encode(text)
        return [token for token in ids if token not in stops]

    def _take(self, context: TokenContext, ids: list[int], finish: FinishReason, *, last: bool) -> None:
        cut = self.draw(st.integers(0, len(ids)))
        first = self.draw(st.integers(0, 3))
        spans = [
            VersionSpan(start=a, end=b, version=v) for a, b, v in ((0, cut, first), (cut, len(ids), first + 1)) if a < b
        ]
        prompt, branch = context.prompt(), context.current
        said = context.turn_with(ids) if last else None
        context.append_generation(
            ids,
            [-0.5] * len(ids),
            spans,
            call=len(self.calls),
            finish=finish,
            said=None if said is None else said.as_message(),
        )
        assert context.current is branch
        assert context.prompt()[: len(prompt)] == prompt
        versions = [span.version for span in spans for _ in range(span.start, span.end)]
        self.made.setdefault(branch.index, []).append((len(prompt), list(ids), versions))
        self.calls.append(
            CallRecord(
                n=len(self.calls),
                turn=self.turn,
                branch=branch.index,
                backend="b",
                policy_versions=spans,
                prompt_len=len(prompt),
                sampled_len=len(ids),
                finish_reason=finish,
                latency_s=0.0,
            )
        )


def _version_at(branch: Branch, place: int) -> int | None:
    (span,) = [span for span in branch.versions if span.start <= place < span.end]
    return span.version
