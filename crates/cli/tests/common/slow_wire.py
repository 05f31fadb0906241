"""A slow wire: the packets of one tun device come out of another one, later. It is for kernels
without netem.

Usage: slow_wire.py DEVICE DEVICE DELAY_MS MBIT_PER_S

It makes both devices, says `ready`, and goes on until its input ends. A packet leaves when the ones
before it have left, at the rate, and arrives after the delay. A packet that finds the queue full is
lost, as on a real wire.
"""

import collections
import fcntl
import os
import select
import struct
import sys
import time

TUNSETIFF, TUN, NO_HEADER = 0x400454CA, 0x0001, 0x1000
QUEUED = 1 << 20  # bytes of a direction


def device(name):
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, TUNSETIFF, struct.pack("16sH22x", name.encode(), TUN | NO_HEADER))
    return file


class Direction:
    def __init__(self, source, sink, delay_s, bytes_per_s):
        self.source, self.sink, self.delay_s, self.bytes_per_s = source, sink, delay_s, bytes_per_s
        self.free = 0.0  # when the packets so far have left
        self.queue, self.queued = collections.deque(), 0

    def take(self, now):
        packet = os.read(self.source, 1 << 16)
        if self.queued + len(packet) <= QUEUED:
            self.free = max(now, self.free) + len(packet) / self.bytes_per_s
            self.queue.append((self.free + self.delay_s, packet))
            self.queued += len(packet)

    def deliver(self, now):
        """Seconds until the next packet arrives, if there is one."""
        while self.queue:
            due, packet = self.queue[0]
            if due > now:
                return due - now
            self.queue.popleft()
            self.queued -= len(packet)
            try:
                os.write(self.sink, packet)
            except OSError:
                pass  # the other end is down: lost
        return None


def main():
    ends = [device(name) for name in sys.argv[1:3]]
    delay_s, bytes_per_s = float(sys.argv[3]) / 1e3, float(sys.argv[4]) * 1e6 / 8
    ways = [Direction(*pair, delay_s, bytes_per_s) for pair in (ends, ends[::-1])]
    print("ready", flush=True)
    while True:
        now = time.monotonic()
        waits = [wait for wait in (way.deliver(now) for way in ways) if wait is not None]
        readable, _, _ = select.select([sys.stdin, *ends], [], [], min(waits, default=None))
        if sys.stdin in readable:
            return
        for way in ways:
            if way.source in readable:
                try:
                    way.take(time.monotonic())
                except OSError:
                    pass  # down, or already read


main()
