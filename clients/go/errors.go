// SPDX-License-Identifier: Apache-2.0

package patchbay

import (
	"context"
	"errors"
	"io"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "patchbay.example/go/v1"
)

const domain = "patchbay"

// Error is a failed call. Use errors.As to get it from an error.
type Error struct {
	Code    codes.Code
	Message string
	// Reason is ERROR_REASON_UNSPECIFIED if this client does not know it.
	Reason pb.ErrorReason
	// ReasonName is the reason as the service names it. It is empty if the service gave no reason, for
	// example because it cannot be reached.
	ReasonName string
	Metadata   map[string]string
	// RetryAfter is the time after which the service suggests to repeat the call; 0 if it suggests
	// none.
	RetryAfter time.Duration
	status     *status.Status
}

func (e *Error) Error() string {
	if e.ReasonName == "" {
		return e.Message
	}
	return e.ReasonName + ": " + e.Message
}

// GRPCStatus returns the status as the service sent it, for status.FromError.
func (e *Error) GRPCStatus() *status.Status { return e.status }

// Gate returns the gate that stayed closed, for the reason GUEST_BUSY. It returns GATE_UNSPECIFIED
// if this client does not know the gate; Metadata["gate"] has its name.
func (e *Error) Gate() pb.Gate {
	return pb.Gate(pb.Gate_value["GATE_"+e.Metadata["gate"]])
}

// ReasonOf returns the reason of an error; ERROR_REASON_UNSPECIFIED if it has none.
func ReasonOf(err error) pb.ErrorReason {
	var failed *Error
	if errors.As(err, &failed) {
		return failed.Reason
	}
	return pb.ErrorReason_ERROR_REASON_UNSPECIFIED
}

func wrap(err error) error {
	if err == nil || errors.Is(err, io.EOF) {
		return err
	}
	answer, ok := status.FromError(err)
	if !ok {
		return err
	}
	failed := &Error{Code: answer.Code(), Message: answer.Message(), status: answer}
	for _, detail := range answer.Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			if detail.GetDomain() == domain {
				failed.ReasonName = detail.GetReason()
				failed.Reason = pb.ErrorReason(pb.ErrorReason_value["ERROR_REASON_"+failed.ReasonName])
				failed.Metadata = detail.GetMetadata()
			}
		case *errdetails.RetryInfo:
			failed.RetryAfter = detail.GetRetryDelay().AsDuration()
		}
	}
	return failed
}

func unaryErrors(ctx context.Context, method string, request, answer any, conn *grpc.ClientConn,
	invoke grpc.UnaryInvoker, options ...grpc.CallOption) error {
	return wrap(invoke(ctx, method, request, answer, conn, options...))
}

func streamErrors(ctx context.Context, description *grpc.StreamDesc, conn *grpc.ClientConn,
	method string, open grpc.Streamer, options ...grpc.CallOption) (grpc.ClientStream, error) {
	stream, err := open(ctx, description, conn, method, options...)
	if err != nil {
		return nil, wrap(err)
	}
	return wrapped{stream}, nil
}

type wrapped struct{ grpc.ClientStream }

func (w wrapped) RecvMsg(message any) error { return wrap(w.ClientStream.RecvMsg(message)) }
