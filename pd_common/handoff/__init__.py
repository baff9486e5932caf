"""The handoff core: chunks, slots, states, sender, receiver and quarantine. It knows neither gRPC nor UCX."""
