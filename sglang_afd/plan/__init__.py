"""The planner: does AFD pay here, with which ratio, and what will it deliver?

``python -m sglang_afd.plan --help`` explains the command, docs/planner.md the method.  From a
model's config.json and a GPU's profile:

* `shape`: what config.json says of sizes; `profile`: what a GPU can do, and how that is known;
* `ledger`: bytes between the roles and on each rank;
* `routing`, `kernels`: how often experts are touched, and how long each kernel kind takes;
* `step`: the closed form of a decode step, colocated, AFD and CAD; `simulate`: the same, as events;
* `layouts`, `search`: every ratio, and the best; `verdict`, `output`, `plot`: what it means;
* `calibrate`: measure a profile (the only module that imports torch).
"""
