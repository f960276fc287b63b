"""Driver that presses keys on a real screen."""

import asyncio


class Driver:
    """Presses keys and waits until the screen has responded."""

    def __init__(self, app, pilot):
        self.app, self.pilot = app, pilot

    @property
    def screen(self):
        return self.app.screen_stack[1]

    async def press(self, *keys):
        for key in keys:
            self.app.simulate_key(key)
            await self._answer()
        await self.pilot.pause()

    async def settle(self):
        await self._answer()
        await self.pilot.pause()

    async def until(self, condition):
        """Wait for a condition: after a resize, the screen counts as settled until it receives the event."""
        for _ in range(6000):  # upper bound
            if condition():
                break
            await asyncio.sleep(0.01)
        assert condition(), "the screen never met the condition"

    async def _answer(self):
        await self.pilot.pause()
        for _ in range(6000):  # upper bound
            if self.screen.settled:
                break
            assert self.app.return_value is None, f"the app ended: {self.app.return_value!r}"
            await asyncio.sleep(0.01)
        assert self.screen.settled, "the screen still waits for an answer"
