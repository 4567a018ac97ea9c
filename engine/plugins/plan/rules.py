"""No rule of the registry: `plan.row_findings` imports torch, and finds `train.plan`. Its page is in `pages`."""
