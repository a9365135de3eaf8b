"""The trainer's claim, a worker's observation, and the pure comparison of the two.

`model` and `verdict` hold the values, `compare` and `explain` judge, `codec` reads and writes files, `wire` and
`wire_verdict` speak `syncguard.v1`.
"""
