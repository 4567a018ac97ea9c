"""The ledger of rewards, the rules that move them, and credit assignment."""
