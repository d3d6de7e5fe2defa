"""Hosts of their own, nothing disturbed: the texts are transformers'."""

import asyncio

from tests.multinode.lab import BULK, SOME, Lab


def test_two_and_two_hosts_answer_as_transformers_does(two_and_two: Lab) -> None:
    lab = two_and_two

    async def run() -> None:
        async with lab.client() as session:
            await session.correct(SOME + BULK)
            await session.pages_home()
            failed = [await session.counter(name, "failed_writes") for name in lab.names]
            assert failed == [0] * len(failed)

    asyncio.run(run())
