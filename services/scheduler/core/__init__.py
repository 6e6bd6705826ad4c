"""The scheduler's pure core: what runs in the next iteration, and who owns which K/V block.

No module in here does I/O, reads a clock, logs, knows asyncio, gRPC or torch; a test walks the imports. Time comes in
as an argument, decisions go out as values. The same core can run under a virtual clock, in a simulator.
"""
