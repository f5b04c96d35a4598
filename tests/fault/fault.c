/* Makes the N-th call of one system call fail, on paths that contain a given text. Loaded with LD_PRELOAD.
 *
 *   fault_arm("pwrite", 3, "ENOSPC", "/out")   the third pwrite on a path that contains "/out"
 *   fault_count("pwrite")                      how many there were since fault_arm
 *
 * Actions: the name of an errno; SHORT (half of the bytes); KILL (SIGKILL before the call), AFTER (SIGKILL after it);
 * NONE (count only). A call that fails is not made, but close() is.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { WRITE, PWRITE, READ, PREAD, PREADV, FSYNC, RENAME, OPEN, MKDIR, FTRUNCATE, FALLOCATE, CLOSE, UNLINK, RMDIR, CALLS };
static const char *names[CALLS] = {"write", "pwrite", "read", "pread", "preadv", "fsync", "rename",
                                   "open", "mkdir", "ftruncate", "fallocate", "close", "unlink", "rmdir"};
enum { NONE, FAIL, SHORT, KILL, AFTER };

static atomic_int counts[CALLS];
static int armed = -1, nth, action = NONE, error_number;
static char filter[PATH_MAX];

void fault_arm(const char *call, int n, const char *what, const char *path) {
    static const struct { const char *name; int number; } errors[] = {
        {"EIO", EIO}, {"ENOSPC", ENOSPC}, {"EDQUOT", EDQUOT}, {"EINTR", EINTR}, {"EACCES", EACCES}, {"ESTALE", ESTALE},
        {"EOPNOTSUPP", EOPNOTSUPP}};
    armed = -1;
    for (int i = 0; i < CALLS; i++) counts[i] = 0;
    strncpy(filter, path, sizeof filter - 1);
    nth = n;
    action = !strcmp(what, "SHORT") ? SHORT : !strcmp(what, "KILL") ? KILL : !strcmp(what, "AFTER") ? AFTER : NONE;
    for (unsigned i = 0; i < sizeof errors / sizeof *errors; i++)
        if (!strcmp(what, errors[i].name)) action = FAIL, error_number = errors[i].number;
    for (int i = 0; i < CALLS; i++)
        if (!strcmp(call, names[i])) armed = i;
    if (!strcmp(call, "any")) armed = CALLS;
}

int fault_count(const char *call) {
    for (int i = 0; i < CALLS; i++)
        if (!strcmp(call, names[i])) return counts[i];
    return -1;
}

static int matches(const char *path) { return armed >= 0 && path && strstr(path, filter) != NULL; }

static int fd_matches(int fd) {
    if (armed < 0) return 0;
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n <= 0) return 0;
    path[n] = 0;
    return matches(path);
}

/* What to do with this call. */
static int decide(int call, int hit) {
    if (!hit) return NONE;
    int number = ++counts[call];
    if (call != armed || number != nth) return NONE;
    if (action == KILL) kill(getpid(), SIGKILL);
    return action;
}

static ssize_t done(int what, ssize_t result) {
    if (what == AFTER) kill(getpid(), SIGKILL);
    return result;
}

#define REAL(type, name, ...) \
    static type (*real)(__VA_ARGS__); \
    if (!real) real = (type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name)
#define FAIL_IF(what) \
    if ((what) == FAIL) { errno = error_number; return -1; }


ssize_t write(int fd, const void *data, size_t n) {
    REAL(ssize_t, write, int, const void *, size_t);
    int what = decide(WRITE, fd_matches(fd));
    FAIL_IF(what);
    return done(what, real(fd, data, what == SHORT && n > 1 ? n / 2 : n));
}

ssize_t read(int fd, void *data, size_t n) {
    REAL(ssize_t, read, int, void *, size_t);
    int what = decide(READ, fd_matches(fd));
    FAIL_IF(what);
    return done(what, real(fd, data, what == SHORT && n > 1 ? n / 2 : n));
}

#define POSITIONED(name, call, pointer) \
    ssize_t name(int fd, pointer data, size_t n, off_t offset) { \
        REAL(ssize_t, name, int, pointer, size_t, off_t); \
        int what = decide(call, fd_matches(fd)); \
        FAIL_IF(what); \
        return done(what, real(fd, data, what == SHORT && n > 1 ? n / 2 : n, offset)); \
    }
POSITIONED(pwrite, PWRITE, const void *)
POSITIONED(pwrite64, PWRITE, const void *)
POSITIONED(pread, PREAD, void *)
POSITIONED(pread64, PREAD, void *)

#define VECTOR(name) \
    ssize_t name(int fd, const struct iovec *parts, int n, off_t offset) { \
        REAL(ssize_t, name, int, const struct iovec *, int, off_t); \
        int what = decide(PREADV, fd_matches(fd)); \
        FAIL_IF(what); \
        struct iovec half = parts[0]; \
        if (what == SHORT && half.iov_len > 1) { \
            half.iov_len /= 2; \
            return real(fd, &half, 1, offset); \
        } \
        return done(what, real(fd, parts, n, offset)); \
    }
VECTOR(preadv)
VECTOR(preadv64)

#define VECTOR2(name) /* what Python's os.preadv calls */ \
    ssize_t name(int fd, const struct iovec *parts, int n, off_t offset, int flags) { \
        REAL(ssize_t, name, int, const struct iovec *, int, off_t, int); \
        int what = decide(PREADV, fd_matches(fd)); \
        FAIL_IF(what); \
        struct iovec half = parts[0]; \
        if (what == SHORT && half.iov_len > 1) { \
            half.iov_len /= 2; \
            return real(fd, &half, 1, offset, flags); \
        } \
        return done(what, real(fd, parts, n, offset, flags)); \
    }
VECTOR2(preadv2)
VECTOR2(preadv64v2)

int fsync(int fd) {
    REAL(int, fsync, int);
    int what = decide(FSYNC, fd_matches(fd));
    FAIL_IF(what);
    return done(what, real(fd));
}

#define TRUNCATE(name) \
    int name(int fd, off_t size) { \
        REAL(int, name, int, off_t); \
        int what = decide(FTRUNCATE, fd_matches(fd)); \
        FAIL_IF(what); \
        return done(what, real(fd, size)); \
    }
TRUNCATE(ftruncate)
TRUNCATE(ftruncate64)

#define ALLOCATE(name) \
    int name(int fd, int mode, off_t offset, off_t size) { \
        REAL(int, name, int, int, off_t, off_t); \
        int what = decide(FALLOCATE, fd_matches(fd)); \
        FAIL_IF(what); \
        return done(what, real(fd, mode, offset, size)); \
    }
ALLOCATE(fallocate)
ALLOCATE(fallocate64)

int close(int fd) {
    REAL(int, close, int);
    int what = decide(CLOSE, fd_matches(fd)), result = real(fd);
    FAIL_IF(what);
    return done(what, result);
}

int rename(const char *from, const char *to) {
    REAL(int, rename, const char *, const char *);
    int what = decide(RENAME, matches(from) || matches(to));
    FAIL_IF(what);
    return done(what, real(from, to));
}

int renameat2(int a, const char *from, int b, const char *to, unsigned flags) {
    REAL(int, renameat2, int, const char *, int, const char *, unsigned);
    int what = decide(RENAME, matches(from) || matches(to));
    FAIL_IF(what);
    return done(what, real(a, from, b, to, flags));
}

int mkdir(const char *path, mode_t mode) {
    REAL(int, mkdir, const char *, mode_t);
    int what = decide(MKDIR, matches(path));
    FAIL_IF(what);
    return done(what, real(path, mode));
}

int unlink(const char *path) {
    REAL(int, unlink, const char *);
    int what = decide(UNLINK, matches(path));
    FAIL_IF(what);
    return done(what, real(path));
}

int rmdir(const char *path) {
    REAL(int, rmdir, const char *);
    int what = decide(RMDIR, matches(path));
    FAIL_IF(what);
    return done(what, real(path));
}

#define OPENED(name) \
    int name(const char *path, int flags, ...) { \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
        va_end(rest); \
        REAL(int, name, const char *, int, ...); \
        int what = decide(OPEN, matches(path)); \
        FAIL_IF(what); \
        return done(what, real(path, flags, mode)); \
    }
OPENED(open)
OPENED(open64)

#define OPENED_AT(name) \
    int name(int folder, const char *path, int flags, ...) { \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
        va_end(rest); \
        REAL(int, name, int, const char *, int, ...); \
        int what = decide(OPEN, matches(path)); \
        FAIL_IF(what); \
        return done(what, real(folder, path, flags, mode)); \
    }
OPENED_AT(openat)
OPENED_AT(openat64)
