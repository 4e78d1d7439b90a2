"""One running sequence: its next step, its unacked token, its end. Pure.

Owns the rule of one unacked append, the pages asked for ahead, and what a token event says.

A sequence runs while it has no end. Each turn of the loop: `next_step` gives what to compute;
`computed` takes the result; once the append before is acked, `entry` gives what to log; `acked`
gives the token to send. Illegal calls raise and change nothing.

Invariants: a token is given out only after its ack; a computed token is logged only after the one
before it was acked, so at most one append is unacked; after a token with a finish reason nothing
is computed.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.arena.append import AppendEntry, AppendOutcome
from baton.arena.checksums import SlotChecksum
from baton.arena.page_table import PageTable
from baton.arena.replay import HeldLog
from baton.errors import ServiceError
from baton.worker.output import OutputState, OutputToken
from services.decode.events import Produced, TokenCounts


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInput:
    """The token at `position` is consumed; `pages` hold positions 0 to `position`."""

    token_id: int
    position: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Computed:
    token: OutputToken
    checksum: SlotChecksum


class Sequence:
    """A sequence that was joined. `last_token_id` is the newest token, whose KV is not there yet.

    `tokens_max`: most tokens, prompt and output, it can have; bounds the pages it asks for.
    """

    def __init__(
        self,
        *,
        request_id: str,
        log: HeldLog,
        table: PageTable,
        output: OutputState,
        last_token_id: int,
        cached_tokens: int,
        exactness: str,
        tokens_max: int,
        delivered: tuple[OutputToken, ...] = (),
    ) -> None:
        assert output.output_tokens >= 1, "a joined sequence has its first token"
        assert len(delivered) == output.output_tokens
        self.request_id = request_id
        self.log = log
        self.table = table
        self.output = output
        self._cached_tokens = cached_tokens
        self.exactness = exactness
        self._tokens_max = tokens_max
        self._last_token_id = last_token_id
        self._tokens = output.prompt_tokens + output.output_tokens
        self._delivered = list(delivered)
        self._joined_tokens = len(delivered)
        self._computed: _Computed | None = None
        self._unacked: OutputToken | None = None
        self._failure: ServiceError | None = None

    @property
    def tokens(self) -> int:
        """Tokens, the computed but unacked ones included."""
        return self._tokens

    @property
    def is_finished(self) -> bool:
        """Its last token was acked."""
        last = self._delivered[-1]
        return last.finish_reason is not None

    @property
    def failure(self) -> ServiceError | None:
        """Why it must end before its time; None while it may go on."""
        return self._failure

    @property
    def has_unacked(self) -> bool:
        """An append is under way."""
        return self._unacked is not None

    @property
    def is_first_own(self) -> bool:
        """No token that was computed here has been given out yet."""
        return len(self._delivered) == self._joined_tokens

    def fail(self, error: ServiceError) -> None:
        """It must end; the first cause stays. Takes effect between two steps."""
        if self._failure is None:
            self._failure = error

    def is_starved(self) -> bool:
        """It could step, but for a page that no ack under way will bring."""
        return self._may_step() and self._unacked is None and not self.table.reach(self._tokens)

    def missing_pages(self) -> int:
        """Pages to ask for when starved."""
        return max(1, self.table.missing_pages(self._tokens - 1, self._ahead_tokens()))

    def next_step(self) -> StepInput | None:
        """What to compute next; None when there is nothing to compute or no page for it."""
        if not self._may_step() or not self.table.reach(self._tokens):
            return None
        return StepInput(
            token_id=self._last_token_id,
            position=self._tokens - 1,
            pages=tuple(self.table.pages(self._tokens)),
        )

    def computed(self, token: OutputToken, checksum: SlotChecksum) -> None:
        """The step's token; `checksum` is that of the KV slot the step wrote."""
        assert self._computed is None, "a computed token waits for its append"
        self._computed = _Computed(token, checksum)
        self._last_token_id = token.sampled.token_id
        self._tokens += 1

    def entry(self) -> AppendEntry | None:
        """What to log now; None when nothing was computed."""
        if self._computed is None:
            return None
        assert self._unacked is None, "one unacked append at a time"
        token, checksum = self._computed.token, self._computed.checksum
        position = self._tokens - 1
        is_last = token.finish_reason is not None
        wanted = 0
        if not is_last:
            wanted = self.table.missing_pages(position, self._ahead_tokens())
        self._computed, self._unacked = None, token
        return AppendEntry(
            log_id=self.log.log_id,
            generation=self.log.generation,
            position=position,
            sampled=token.sampled,
            page=self.table.slot(position - 1)[0],
            checksum=checksum,
            finish_reason=token.finish_reason,
            pages_wanted=wanted,
        )

    def acked(self, outcome: AppendOutcome) -> Produced | None:
        """The token to send now that it is logged; None, and a failure, when it was refused."""
        token = self._unacked
        assert token is not None, "nothing to ack"
        self._unacked = None
        if outcome.error is not None:
            self.fail(outcome.error)
            return None
        self.table.grant(outcome.pages)
        self._delivered.append(token)
        return self._produced(token)

    def delivered_from(self, index: int) -> tuple[Produced, ...]:
        """The tokens from output index `index` on, as they were sent before."""
        return tuple(self._produced(token) for token in self._delivered[index:])

    @property
    def delivered_tokens(self) -> int:
        """How many output tokens are acked."""
        return len(self._delivered)

    def _may_step(self) -> bool:
        if self._failure is not None or self._computed is not None:
            return False
        newest = self._unacked or self._delivered[-1]
        return newest.finish_reason is None

    def _ahead_tokens(self) -> int:
        """Positions to have pages for from the newest token's on.

        Half a page: if the store is short, several acks may still bring the page in time.
        """
        left = self._tokens_max - self._tokens
        return max(1, min(self.table.block_tokens // 2 + 1, left))

    def _produced(self, token: OutputToken) -> Produced:
        usage = None
        if token.finish_reason is not None:
            usage = TokenCounts(
                prompt_tokens=self.output.prompt_tokens,
                cached_tokens=self._cached_tokens,
                completion_tokens=token.index + 1,
            )
        return Produced(token=token, usage=usage)
