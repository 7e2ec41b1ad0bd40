"""What two Stacks can do, on tasks whose answers can be checked."""

from strop.evals.behaviour.part import Behaviour

__all__ = ["Behaviour"]
