"""The planner: what a model needs and how fast it will be, from headers alone. Formulas are in docs/planner.md."""
