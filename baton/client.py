"""One channel per peer, shared by everything in a process that talks to it.

Owns the pool and nothing of what goes through it. Not safe across event loops: one process, one
loop.
"""

from __future__ import annotations

import asyncio
from typing import Final

import grpc

from baton.errors import Reason, ServiceError
from baton.rpc.channel import Channel, ChannelOptions, open_channel

CHANNELS_MAX: Final = 1024
CLOSE_GRACE_S: Final = 1.0


class ChannelPool:
    """Opens channels by target on first use and closes them all in the end.

    Fits `baton.lifecycle` as a part: `start`, `drain` and `stop` are its ends.
    """

    def __init__(self, options: ChannelOptions | None = None) -> None:
        self._options = options or ChannelOptions()
        self._channels: dict[str, Channel] = {}
        self._is_closed = False

    def get(self, target: str) -> Channel:
        """The channel to a target, opened if new; the pool owns it, do not close it."""
        if self._is_closed:
            raise ServiceError(Reason.DRAINING, "this process is stopping and opens no channel")
        channel = self._channels.get(target)
        if channel is None:
            if len(self._channels) >= CHANNELS_MAX:
                raise ServiceError(Reason.QUEUE_FULL, f"{CHANNELS_MAX} channels are open")
            channel = self._channels[target] = open_channel(target, self._options)
        return channel

    def detach_failed(self, target: str) -> Channel | None:
        """Takes out a channel that waits between two failed tries to connect; the caller closes it.

        For when the peer was heard by other means: the next `get` connects at once, where the old
        channel would have failed every call until its wait is over. None when there is none such.
        """
        channel = self._channels.get(target)
        if channel is None or channel.get_state() is not grpc.ChannelConnectivity.TRANSIENT_FAILURE:
            return None
        return self._channels.pop(target)

    async def forget(self, target: str) -> None:
        """Closes the channel to a peer that is gone for good; unknown targets are fine."""
        channel = self._channels.pop(target, None)
        if channel is not None:
            await channel.close(CLOSE_GRACE_S)

    async def start(self) -> None:
        """Nothing: channels open on first use."""

    async def drain(self) -> None:
        """Nothing: running work still needs its channels."""

    async def stop(self) -> None:
        """Closes every channel, together; `get` refuses from now on."""
        self._is_closed = True
        channels = tuple(self._channels.values())
        self._channels.clear()
        async with asyncio.TaskGroup() as closing:
            for channel in channels:
                closing.create_task(channel.close(CLOSE_GRACE_S))

    async def __aenter__(self) -> ChannelPool:
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self.stop()
