"""Dense rows that do not depend on each other: what verifies drafts. Imports kernels.common."""
