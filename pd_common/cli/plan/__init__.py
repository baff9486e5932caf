from pd_common.cli.plan.command import plan

__all__ = ["plan"]
