/* Makes the N-th call of one system call fail, on paths that contain a given text. Loaded with LD_PRELOAD.
 *
 *   fault_arm("pwrite", 3, "ENOSPC", "/out")   the third pwrite on a path that contains "/out"
 *   fault_count("pwrite")                      how many there were since fault_arm
 *   fault_trace(fd, "/out")                    notes every change there in a file; see crash.py
 *
 * Actions: the name of an errno; SHORT (half of the bytes); KILL (SIGKILL before the call), AFTER (SIGKILL after it);
 * NONE (count only). A call that fails is not made, but close() is. Calls that differ in their spelling only have one
 * name: "open" is also openat, "stat" lstat and fstat, "list" reads a folder, "unlink" and "rmdir" are also unlinkat.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { WRITE, PWRITE, READ, PREAD, PREADV, FSYNC, RENAME, OPEN, MKDIR, FTRUNCATE, FALLOCATE, CLOSE, UNLINK, RMDIR,
       LINK, STAT, LIST, CALLS };
static const char *names[CALLS] = {"write", "pwrite", "read", "pread", "preadv", "fsync", "rename", "open", "mkdir",
                                   "ftruncate", "fallocate", "close", "unlink", "rmdir", "link", "stat", "list"};
enum { NONE, FAIL, SHORT, KILL, AFTER };

static atomic_int counts[CALLS];
static int armed = -1, nth, action = NONE, error_number, trace = -1;
static char filter[PATH_MAX];
static pthread_mutex_t order = PTHREAD_MUTEX_INITIALIZER;
static __thread int inside; /* our own calls are nobody's */

void fault_arm(const char *call, int n, const char *what, const char *path) {
    static const struct { const char *name; int number; } errors[] = {
        {"EIO", EIO}, {"ENOSPC", ENOSPC}, {"EDQUOT", EDQUOT}, {"EINTR", EINTR}, {"EACCES", EACCES}, {"ESTALE", ESTALE},
        {"EOPNOTSUPP", EOPNOTSUPP}, {"EPERM", EPERM}};
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

void fault_trace(int fd, const char *path) {
    strncpy(filter, path, sizeof filter - 1);
    trace = fd;
}

static int watching(void) { return (armed >= 0 || trace >= 0) && !inside; }

static int matches(const char *path) { return watching() && path && strstr(path, filter) != NULL; }

static int path_of(int fd, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, PATH_MAX - 1);
    path[n < 0 ? 0 : n] = 0;
    return n > 0;
}

static int fd_matches(int fd) {
    char path[PATH_MAX];
    return watching() && path_of(fd, path) && matches(path);
}

/* The whole of a path relative to a folder. */
static const char *at(int folder, const char *path, char *whole) {
    if (folder == AT_FDCWD || !path || *path == '/') return path;
    if (!watching() || !path_of(folder, whole)) return "";
    snprintf(whole + strlen(whole), PATH_MAX - strlen(whole), "/%s", path);
    return whole;
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

/* While a trace is kept, a change and its note are one step, in all threads and processes. */
static void lock(void) {
    pthread_mutex_lock(&order);
    flock(trace, LOCK_EX);
    inside = 1;
}

static void unlock(void) {
    inside = 0;
    flock(trace, LOCK_UN);
    pthread_mutex_unlock(&order);
}

static void note(const void *data, size_t n, const char *format, ...) {
    char line[3 * PATH_MAX];
    va_list rest;
    va_start(rest, format);
    vsnprintf(line, sizeof line, format, rest);
    va_end(rest);
    if (write(trace, line, strlen(line)) < 0 || (n && write(trace, data, n) != (ssize_t)n)) _exit(98);
}

static unsigned long inode(int fd) {
    struct stat status;
    fstat(fd, &status);
    return status.st_ino;
}

static unsigned long inode_at(const char *path) {
    struct stat status;
    return lstat(path, &status) ? 0 : status.st_ino;
}

static long size_of(int fd) {
    struct stat status;
    fstat(fd, &status);
    return status.st_size;
}

static long position(int fd) { return fcntl(fd, F_GETFL) & O_APPEND ? size_of(fd) : lseek(fd, 0, SEEK_CUR); }

/* Makes a call and, if it was good, notes what it did; `before` is done first. */
#define TRACED(hit, type, before, call, ...) ({ \
    type result; \
    if (trace >= 0 && (hit)) { \
        lock(); \
        before; \
        result = call; \
        if (result >= 0) note(__VA_ARGS__); \
        unlock(); \
    } else result = call; \
    result; })

ssize_t write(int fd, const void *data, size_t n) {
    REAL(ssize_t, write, int, const void *, size_t);
    int hit = fd_matches(fd), what = decide(WRITE, hit);
    long start = 0;
    FAIL_IF(what);
    if (what == SHORT && n > 1) n /= 2;
    return done(what, TRACED(hit, ssize_t, start = position(fd), real(fd, data, n),
                             data, result, "data %lu %ld %ld\n", inode(fd), start, (long)result));
}

ssize_t read(int fd, void *data, size_t n) {
    REAL(ssize_t, read, int, void *, size_t);
    int what = decide(READ, fd_matches(fd));
    FAIL_IF(what);
    return done(what, real(fd, data, what == SHORT && n > 1 ? n / 2 : n));
}

#define WRITTEN_AT(name) \
    ssize_t name(int fd, const void *data, size_t n, off_t offset) { \
        REAL(ssize_t, name, int, const void *, size_t, off_t); \
        int hit = fd_matches(fd), what = decide(PWRITE, hit); \
        FAIL_IF(what); \
        if (what == SHORT && n > 1) n /= 2; \
        return done(what, TRACED(hit, ssize_t, , real(fd, data, n, offset), \
                                 data, result, "data %lu %ld %ld\n", inode(fd), (long)offset, (long)result)); \
    }
WRITTEN_AT(pwrite)
WRITTEN_AT(pwrite64)

/* Of one piece, with flags: what `os.pwritev` calls. */
#define WRITTEN_VECTOR(name) \
    ssize_t name(int fd, const struct iovec *parts, int n, off_t offset, int flags) { \
        REAL(ssize_t, name, int, const struct iovec *, int, off_t, int); \
        int hit = fd_matches(fd), what = decide(PWRITE, hit); \
        struct iovec part = parts[0]; \
        FAIL_IF(what); \
        if (what == SHORT && part.iov_len > 1) part.iov_len /= 2; \
        return done(what, TRACED(hit, ssize_t, , real(fd, &part, 1, offset, flags), \
                                 part.iov_base, result, "data %lu %ld %ld\n", inode(fd), (long)offset, (long)result)); \
    }
WRITTEN_VECTOR(pwritev2)
WRITTEN_VECTOR(pwritev64v2)

#define READ_AT(name) \
    ssize_t name(int fd, void *data, size_t n, off_t offset) { \
        REAL(ssize_t, name, int, void *, size_t, off_t); \
        int what = decide(PREAD, fd_matches(fd)); \
        FAIL_IF(what); \
        return done(what, real(fd, data, what == SHORT && n > 1 ? n / 2 : n, offset)); \
    }
READ_AT(pread)
READ_AT(pread64)

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
    int hit = fd_matches(fd), what = decide(FSYNC, hit);
    FAIL_IF(what);
    return done(what, TRACED(hit, int, , real(fd), NULL, 0, "sync %lu\n", inode(fd)));
}

#define TRUNCATE(name) \
    int name(int fd, off_t size) { \
        REAL(int, name, int, off_t); \
        int hit = fd_matches(fd), what = decide(FTRUNCATE, hit); \
        FAIL_IF(what); \
        return done(what, TRACED(hit, int, , real(fd, size), NULL, 0, "size %lu %ld\n", inode(fd), size_of(fd))); \
    }
TRUNCATE(ftruncate)
TRUNCATE(ftruncate64)

#define ALLOCATE(name) \
    int name(int fd, int mode, off_t offset, off_t size) { \
        REAL(int, name, int, int, off_t, off_t); \
        int hit = fd_matches(fd), what = decide(FALLOCATE, hit); \
        FAIL_IF(what); \
        return done(what, TRACED(hit, int, , real(fd, mode, offset, size), \
                                 NULL, 0, "size %lu %ld\n", inode(fd), size_of(fd))); \
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
    int hit = matches(from) || matches(to), what = decide(RENAME, hit);
    FAIL_IF(what);
    return done(what, TRACED(hit, int, , real(from, to), NULL, 0, "rename %s\t%s\n", from, to));
}

int renameat2(int a, const char *from, int b, const char *to, unsigned flags) {
    REAL(int, renameat2, int, const char *, int, const char *, unsigned);
    int hit = matches(from) || matches(to), what = decide(RENAME, hit);
    FAIL_IF(what);
    return done(what, TRACED(hit, int, , real(a, from, b, to, flags), NULL, 0,
                             "%s %s\t%s\n", flags & RENAME_EXCHANGE ? "exchange" : "rename", from, to));
}

int link(const char *from, const char *to) {
    REAL(int, link, const char *, const char *);
    int hit = matches(from) || matches(to), what = decide(LINK, hit);
    FAIL_IF(what);
    return done(what, TRACED(hit, int, , real(from, to), NULL, 0, "link %s\t%s\n", from, to));
}

int mkdir(const char *path, mode_t mode) {
    REAL(int, mkdir, const char *, mode_t);
    int hit = matches(path), what = decide(MKDIR, hit);
    FAIL_IF(what);
    return done(what, TRACED(hit, int, , real(path, mode), NULL, 0, "folder %lu %s\n", inode_at(path), path));
}

#define REMOVED(name, call) \
    int name(const char *path) { \
        REAL(int, name, const char *); \
        int hit = matches(path), what = decide(call, hit); \
        FAIL_IF(what); \
        return done(what, TRACED(hit, int, , real(path), NULL, 0, "remove %s\n", path)); \
    }
REMOVED(unlink, UNLINK)
REMOVED(rmdir, RMDIR)

int unlinkat(int folder, const char *path, int flags) {
    REAL(int, unlinkat, int, const char *, int);
    char buffer[PATH_MAX];
    const char *whole = at(folder, path, buffer);
    int hit = matches(whole), what = decide(flags & AT_REMOVEDIR ? RMDIR : UNLINK, hit);
    FAIL_IF(what);
    return done(what, TRACED(hit, int, , real(folder, path, flags), NULL, 0, "remove %s\n", whole));
}

static int opened(int (*real)(int, const char *, int, ...), int folder, const char *path, int flags, mode_t mode) {
    char buffer[PATH_MAX];
    const char *whole = at(folder, path, buffer);
    int hit = matches(whole), what = decide(OPEN, hit), missing = 0;
    FAIL_IF(what);
    if (!(flags & (O_CREAT | O_TRUNC))) return done(what, real(folder, path, flags, mode));
    return done(what, TRACED(hit, int, missing = access(whole, F_OK), real(folder, path, flags, mode), NULL, 0,
                             missing ? "file %lu %s\n" : flags & O_TRUNC ? "size %lu 0\n" : "", inode_at(whole), whole));
}

#define OPENED(name, target, parameter, folder) \
    int name(parameter const char *path, int flags, ...) { \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
        va_end(rest); \
        static int (*real)(int, const char *, int, ...); \
        if (!real) real = dlsym(RTLD_NEXT, target); \
        return opened(real, folder, path, flags, mode); \
    }
#define COMMA ,
OPENED(open, "openat", , AT_FDCWD)
OPENED(open64, "openat64", , AT_FDCWD)
OPENED(openat, "openat", int folder COMMA, folder)
OPENED(openat64, "openat64", int folder COMMA, folder)

#define STATED(name, parameters, hit, ...) \
    int name parameters { \
        static int (*real) parameters; \
        if (!real) real = dlsym(RTLD_NEXT, #name); \
        int what = decide(STAT, hit); \
        FAIL_IF(what); \
        return real(__VA_ARGS__); \
    }
STATED(stat, (const char *path, struct stat *into), matches(path), path, into)
STATED(stat64, (const char *path, struct stat64 *into), matches(path), path, into)
STATED(lstat, (const char *path, struct stat *into), matches(path), path, into)
STATED(lstat64, (const char *path, struct stat64 *into), matches(path), path, into)
STATED(fstat, (int fd, struct stat *into), fd_matches(fd), fd, into)
STATED(fstat64, (int fd, struct stat64 *into), fd_matches(fd), fd, into)

static int listed(DIR *folder) { return watching() && fd_matches(dirfd(folder)); }

DIR *opendir(const char *path) {
    REAL(DIR *, opendir, const char *);
    if (decide(LIST, matches(path)) == FAIL) { errno = error_number; return NULL; }
    return real(path);
}

struct dirent64 *readdir64(DIR *folder) {
    REAL(struct dirent64 *, readdir64, DIR *);
    if (decide(LIST, listed(folder)) == FAIL) { errno = error_number; return NULL; }
    return real(folder);
}
