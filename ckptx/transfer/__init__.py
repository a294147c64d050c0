"""Moving bytes from one catalog to another: plan, prove, execute."""
