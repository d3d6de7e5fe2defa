"""How much a grammar may cost: what keeps one request's wish from slowing everybody.

Nodes use the same parser limits as the router's check, so what passes there compiles here.
"""

MAX_GRAMMAR_CHARACTERS = 65_536
"""Of a schema, regex or grammar. The library recurses along references; this bounds how deep."""
CHECK_CPU_S = 0.5
"""Processor time to compile a grammar and to make its first mask; more is refused. What took
seconds in trials was hostile: schemas of ordinary size take 1 to 30 ms."""
CHECK_MEMORY_BYTES = 1 << 30
"""What a check may allocate."""
CHECK_STACK_BYTES = 1 << 20
"""The check's stack. The library recurses, and an overflow ends its process: what survives here
survives on a node, whose engine has the usual 8 MiB and whose compiler has more."""
COMPILE_STACK_BYTES = 16 << 20
MAX_COMPILED = 64
"""Compiled grammars that a node keeps, the least recently used of more being dropped."""
