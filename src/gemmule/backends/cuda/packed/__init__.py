"""Operands that were packed once: the passes that do it, and products that start behind them."""
