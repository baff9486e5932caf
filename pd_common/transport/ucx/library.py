"""Finds and loads libucp through cffi (ABI mode: no compiler), and declares the part of its C interface that is used.

The layouts are those of UCX 1.22; every structure has a field mask and only grew at its end since 1.13, so older
libraries work too.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cffi

from pd_common.errors import TransportUnavailable

WHEEL = "wheel"
SYSTEM = "system"

_DECLARATIONS = """
typedef signed char ucs_status_t;  /* a packed enum */
typedef struct ucp_context *ucp_context_h;
typedef struct ucp_config ucp_config_t;
typedef struct ucp_worker *ucp_worker_h;
typedef struct ucp_ep *ucp_ep_h;
typedef struct ucp_mem *ucp_mem_h;
typedef struct ucp_rkey *ucp_rkey_h;
typedef struct ucp_address ucp_address_t;
typedef void (*ucp_err_handler_cb_t)(void *arg, ucp_ep_h ep, ucs_status_t status);

typedef struct {
    uint64_t field_mask;
    uint64_t features;
    size_t request_size;
    void *request_init;
    void *request_cleanup;
    uint64_t tag_sender_mask;
    int mt_workers_shared;
    size_t estimated_num_eps;
    size_t estimated_num_ppn;
    const char *name;
    size_t node_local_id;
} ucp_params_t;

typedef struct {
    uint64_t field_mask;
    int thread_mode;
    uint64_t cpu_mask[16];
    unsigned events;
    void *user_data;
    int event_fd;
    uint64_t flags;
    const char *name;
    size_t am_alignment;
    uint64_t client_id;
} ucp_worker_params_t;

typedef struct {
    uint64_t field_mask;
    int thread_mode;
    uint32_t address_flags;
    ucp_address_t *address;
    size_t address_length;
    size_t max_am_header;
    char name[32];
    size_t max_debug_string;
} ucp_worker_attr_t;

typedef struct {
    uint64_t field_mask;
    const ucp_address_t *address;
    int err_mode;
    ucp_err_handler_cb_t err_handler_cb;
    void *err_handler_arg;
    void *user_data;
    unsigned flags;
    const void *sockaddr;
    uint32_t sockaddr_length;
    void *conn_request;
    const char *name;
    const void *local_sockaddr;
    uint32_t local_sockaddr_length;
} ucp_ep_params_t;

typedef struct {
    uint64_t field_mask;
    uintptr_t address;
    size_t length;
    unsigned flags;
    unsigned prot;
    int memory_type;
    const void *exported_memh_buffer;
} ucp_mem_map_params_t;

typedef struct {
    uint32_t op_attr_mask;
    uint32_t flags;
    void *request;
    void *callback;
    uint64_t datatype;
    void *user_data;
    void *reply_buffer;
    int memory_type;
    void *recv_info;
    ucp_mem_h memh;
    uint64_t remote_datatype;
    const void *remote;
    size_t remote_count;
} ucp_request_param_t;

typedef struct {
    uint64_t field_mask;
    uintptr_t buffers;
    uintptr_t lengths;
    uintptr_t memhs;
    uintptr_t counts;
    uintptr_t strides;
} ucp_dt_local_sgl_t;

typedef struct {
    uint64_t field_mask;
    uintptr_t remote_addrs;
    uintptr_t lengths;
    uintptr_t rkeys;
} ucp_dt_remote_sgl_t;

typedef struct {
    uint64_t field_mask;
    char *debug_string;
    size_t debug_string_size;
    ucs_status_t status;
    int mem_type;
} ucp_request_attr_t;

const char *ucs_status_string(ucs_status_t status);
const char *ucp_get_version_string(void);
ucs_status_t ucp_config_read(const char *env_prefix, const char *filename, ucp_config_t **config_p);
ucs_status_t ucp_config_modify(ucp_config_t *config, const char *name, const char *value);
void ucp_config_release(ucp_config_t *config);
ucs_status_t ucp_init_version(unsigned major, unsigned minor, const ucp_params_t *params, const ucp_config_t *config,
                              ucp_context_h *context_p);
void ucp_cleanup(ucp_context_h context);
void ucp_context_print_info(ucp_context_h context, void *stream);
ucs_status_t ucp_worker_create(ucp_context_h context, const ucp_worker_params_t *params, ucp_worker_h *worker_p);
void ucp_worker_destroy(ucp_worker_h worker);
ucs_status_t ucp_worker_query(ucp_worker_h worker, ucp_worker_attr_t *attr);
void ucp_worker_release_address(ucp_worker_h worker, ucp_address_t *address);
unsigned ucp_worker_progress(ucp_worker_h worker);
ucs_status_t ucp_worker_get_efd(ucp_worker_h worker, int *fd);
ucs_status_t ucp_worker_arm(ucp_worker_h worker);
ucs_status_t ucp_ep_create(ucp_worker_h worker, const ucp_ep_params_t *params, ucp_ep_h *ep_p);
uintptr_t ucp_ep_flush_nbx(ucp_ep_h ep, const ucp_request_param_t *param);
uintptr_t ucp_ep_close_nbx(ucp_ep_h ep, const ucp_request_param_t *param);
ucs_status_t ucp_ep_rkey_unpack(ucp_ep_h ep, const void *rkey_buffer, ucp_rkey_h *rkey_p);
void ucp_rkey_destroy(ucp_rkey_h rkey);
ucs_status_t ucp_mem_map(ucp_context_h context, const ucp_mem_map_params_t *params, ucp_mem_h *memh_p);
ucs_status_t ucp_mem_unmap(ucp_context_h context, ucp_mem_h memh);
ucs_status_t ucp_rkey_pack(ucp_context_h context, ucp_mem_h memh, void **buffer_p, size_t *size_p);
void ucp_rkey_buffer_release(void *buffer);
/* Pointers that are only ever passed on are declared as integers: no cdata object is made for them. */
uintptr_t ucp_put_nbx(ucp_ep_h ep, uintptr_t buffer, size_t count, uint64_t remote_addr, ucp_rkey_h rkey,
                      const ucp_request_param_t *param);
ucs_status_t ucp_request_check_status(uintptr_t request);
ucs_status_t ucp_request_query(uintptr_t request, ucp_request_attr_t *attr);
void ucp_request_free(uintptr_t request);
"""

_LIBC_DECLARATIONS = """
void *open_memstream(char **buffer_p, size_t *size_p);
int fclose(void *stream);
void free(void *buffer);
"""

ffi: Any = cffi.FFI()
ffi.cdef(_DECLARATIONS)
ffi.cdef(_LIBC_DECLARATIONS)


@dataclass(frozen=True, slots=True)
class UCXLibrary:
    """libucp as loaded: its functions, the file they came from and its version."""

    functions: Any
    path: str
    version: str

    def status_text(self, status: int) -> str:
        """UCX's words for a ucs_status_t."""
        return str(ffi.string(self.functions.ucs_status_string(status)).decode())


def load_library(choice: str) -> UCXLibrary:
    """Loads libucp: `wheel` (the libucx wheel), `system` (the dynamic loader's) or the path of a libucp.so.

    Raises:
        TransportUnavailable: there is no such library, or it is not a UCX.
    """
    target = _wheel_file() if choice == WHEEL else "libucp.so.0" if choice == SYSTEM else choice
    try:
        functions = ffi.dlopen(target)
        version = ffi.string(functions.ucp_get_version_string()).decode()
    except (OSError, AttributeError) as error:
        raise TransportUnavailable(f"UCX cannot be loaded: {error}", ucx_library=choice) from error
    return UCXLibrary(functions, _mapped_file() or target, version)


def _wheel_file() -> str:
    spec = importlib.util.find_spec("libucx")
    if spec is None or spec.origin is None:
        raise TransportUnavailable("the libucx wheel is not installed", ucx_library=WHEEL)
    return str(Path(spec.origin).parent / "lib" / "libucp.so.0")


def _mapped_file() -> str | None:
    """The file that is really mapped: what `system` found, symbolic links resolved."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/libucp.so" in line:
            return line[line.index("/") :]
    return None


def printed(function: Any, handle: Any) -> str:
    """What one of UCX's print functions writes about a handle."""
    buffer, size = ffi.new("char **"), ffi.new("size_t *")
    stream = _libc.open_memstream(buffer, size)
    if stream == ffi.NULL:
        raise OSError(ffi.errno, "open_memstream failed")
    function(handle, stream)
    _libc.fclose(stream)
    text: str = ffi.string(buffer[0]).decode(errors="replace")
    _libc.free(buffer[0])
    return text


_libc: Any = ffi.dlopen(None)
