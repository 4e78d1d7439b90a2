"""gRPC as Baton uses it: one server interceptor, one channel wrapper, one error translation.

Server code raises `baton.errors.ServiceError` and nothing else; only `rpc.interceptor` aborts.
Client code catches `ServiceError`; only `rpc.channel` sees `grpc.aio.AioRpcError`.
"""
